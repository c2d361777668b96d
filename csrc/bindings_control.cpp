// Words and control pages for Python.
#include <nanobind/stl/optional.h>

#include <cstring>

#include "bindings.h"
#include "runtime/control_page.h"
#include "runtime/flags.h"
#include "runtime/word.h"

namespace graphshard {

namespace {

ControlPage::Digest to_digest(const nb::bytes& bytes) {
  ControlPage::Digest digest{};
  if (bytes.size() != digest.size()) throw nb::value_error("a layout digest has 32 bytes");
  std::memcpy(digest.data(), bytes.data(), digest.size());
  return digest;
}

nb::list value_list(const std::vector<CUstreamBatchMemOpParams>& ops) {
  nb::list items;
  for (const CUstreamBatchMemOpParams& op : ops) items.append(value_fields(op));
  return items;
}

nb::tuple to_batches(const FlagOps& ops) { return nb::make_tuple(value_list(ops.writes), value_list(ops.waits)); }

FlagWord flag_word(const std::string& name) {
  if (name == "entry") return entry_word(FlagMode::kCaptured);
  if (name == "exit") return exit_word(FlagMode::kCaptured);
  if (name == "header") return header_word(FlagMode::kCaptured);
  throw nb::value_error(("flag word '" + name + "' is unknown: entry, exit, header").c_str());
}

// Of captured mode alone: its values are constants, so one list serves eager issues and captures.
void bind_flags(nb::module_& m) {
  nb::class_<FlagBarrier>(m, "FlagBarrier")
      .def(nb::init<std::vector<CUdeviceptr>, int>(), "areas"_a, "rank"_a)
      .def_static(
          "area_bytes", [](int world_size) { return flag_area_bytes(world_size); }, "world_size"_a)
      .def(
          "entry",
          [](const FlagBarrier& barrier, uint32_t header) {
            return to_batches(barrier.entry(FlagMode::kCaptured, 1, header));
          },
          "header"_a)
      .def("exit", [](const FlagBarrier& barrier) { return to_batches(barrier.exit(FlagMode::kCaptured, 1)); })
      .def(
          "address",
          [](const FlagBarrier& barrier, int owner, int writer, const std::string& word) {
            const int count = barrier.world_size();
            if (owner < 0 || owner >= count || writer < 0 || writer >= count) throw nb::value_error("no such rank");
            return barrier.address(owner, writer, flag_word(word));
          },
          "owner"_a, "writer"_a, "word"_a);
}

}  // namespace

void bind_control(nb::module_& m) {
  bind_flags(m);
  nb::class_<Word>(m, "Word")
      .def(nb::init<std::shared_ptr<Memory>, size_t>(), "memory"_a, "offset"_a = 0)
      .def_prop_ro("address", &Word::address)
      .def_prop_ro("value", &Word::load)
      .def("store", &Word::store, "value"_a)
      .def(
          "wait",
          [](const Word& word, uint32_t value, double timeout_s) {
            return wait_bounded(timeout_s, [&](int64_t slice_ns) { return word.wait(value, slice_ns); });
          },
          "value"_a, "timeout_s"_a);

  nb::class_<ControlPage>(m, "ControlPage")
      .def(nb::new_(&ControlPage::create))
      .def_static("open_fd", &ControlPage::open_fd, "fd"_a)
      .def("fd", &ControlPage::duplicate_fd)
      .def(
          "set_identity",
          [](ControlPage& page, uint64_t pid, const nb::bytes& digest) {
            page.set_digest(to_digest(digest));
            page.set_pid(pid);
          },
          "pid"_a, "digest"_a)
      .def("set_state", &ControlPage::set_state, "state"_a)
      .def("set_epoch", &ControlPage::set_epoch, "epoch"_a)
      .def("set_progress", &ControlPage::set_progress, "step"_a, "op"_a)
      .def("set_begun", &ControlPage::set_begun, "step"_a, "op"_a)
      .def_prop_ro("begun_step", &ControlPage::begun_step)
      .def_prop_ro("begun_op", &ControlPage::begun_op)
      .def("post_issue", &ControlPage::post_issue, "hash"_a, "what"_a)
      .def(
          "issue",
          [](const ControlPage& page, uint64_t number) -> std::optional<std::pair<uint64_t, uint64_t>> {
            const std::optional<Issue> issue = page.issue(number);
            if (!issue) return std::nullopt;
            return std::pair(issue->hash, issue->what);
          },
          "number"_a)
      .def_prop_ro("num_issues", &ControlPage::num_issues)
      .def("set_num_finished", &ControlPage::set_num_finished, "value"_a)
      .def_prop_ro("num_finished", &ControlPage::num_finished)
      .def(
          "post_failure",
          [](ControlPage& page, const std::string& text, int64_t kind, int64_t unit, int64_t op, int64_t step,
             int64_t culprit) { page.post_failure(Failure{kind, unit, op, step, culprit, text}); },
          "text"_a, "kind"_a, "unit"_a = -1, "op"_a = -1, "step"_a = -1, "culprit"_a = -1)
      .def("claim_first", &ControlPage::claim_first, "rank"_a)
      .def_prop_ro("first_failed", &ControlPage::first_failed)
      .def_prop_ro("has_failed", &ControlPage::has_failed)
      .def_prop_ro(
          "failure",
          [](const ControlPage& page) -> nb::object {
            const std::optional<Failure> failure = page.failure();
            if (!failure) return nb::none();
            // a cut text may end inside a character
            nb::object text = nb::steal(
                PyUnicode_DecodeUTF8(failure->text.data(), static_cast<Py_ssize_t>(failure->text.size()), "ignore"));
            return nb::make_tuple(text, failure->kind, failure->unit, failure->op, failure->step, failure->culprit);
          })
      .def_prop_ro("pid", &ControlPage::pid)
      .def_prop_ro("state", &ControlPage::state)
      .def_prop_ro("epoch", &ControlPage::epoch)
      .def_prop_ro("step", &ControlPage::step)
      .def_prop_ro("op", &ControlPage::op)
      .def_prop_ro("digest", [](const ControlPage& page) {
        const ControlPage::Digest digest = page.digest();
        return nb::bytes(digest.data(), digest.size());
      });
}

}  // namespace graphshard
