// The Python module graphshard._core. Its surface and contracts are in graphshard/_core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "python_calls.h"
#include "runtime/capture_lock.h"
#include "runtime/control_page.h"
#include "runtime/memory.h"
#include "runtime/op_list.h"
#include "runtime/word.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {

namespace {

constexpr int64_t kSignalSliceNs = 100'000'000;

// Waits in slices without the GIL, so that Ctrl-C is answered. `wait` takes nanoseconds and says whether it is over.
template <typename Wait>
bool wait_bounded(double timeout_s, const Wait& wait) {
  if (!(timeout_s >= 0.0) || !std::isfinite(timeout_s)) {
    throw nb::value_error("timeout_s is a finite number of seconds, 0 or more: waits are never unbounded");
  }
  auto left_ns = static_cast<int64_t>(std::min(timeout_s * 1e9, 9e18));
  while (true) {
    const int64_t slice_ns = std::min(left_ns, kSignalSliceNs);
    {
      const ReleasedGil released;
      if (wait(slice_ns)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    left_ns -= slice_ns;
    if (left_ns <= 0) return false;
  }
}

void translate_driver_error(const std::exception_ptr& error, void* type) {
  try {
    std::rethrow_exception(error);
  } catch (const DriverError& failure) {
    nb::object raised = nb::borrow(static_cast<PyObject*>(type))(failure.what());
    raised.attr("code") = static_cast<int>(failure.code());
    raised.attr("entry_point") = failure.entry_point();
    PyErr_SetObject(static_cast<PyObject*>(type), raised.ptr());
  }
}

int memory_get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto& memory = *nb::inst_ptr<Memory>(self);
  view->obj = nullptr;
  if (!memory.driver().is_host()) {
    PyErr_SetString(PyExc_BufferError, "device memory has no buffer on the host: copy it to host memory first");
    return -1;
  }
  return PyBuffer_FillInfo(view, self, reinterpret_cast<void*>(memory.address()),
                           static_cast<Py_ssize_t>(memory.num_bytes()), memory.is_read_only() ? 1 : 0, flags);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&memory_get_buffer)}, {0, nullptr}};

template <typename Number>
Number number(const nb::tuple& op, size_t index) {
  return nb::cast<Number>(op[index]);
}

// Value words are 32 bits; -1 is a value too.
uint32_t word(nb::handle value) {
  const auto wide = nb::cast<int64_t>(value);
  if (wide < INT32_MIN || wide > UINT32_MAX) throw nb::value_error("a value word has 32 bits");
  return static_cast<uint32_t>(wide);
}

struct OpForm {
  const char* name;
  OpKind kind;
  size_t length;
};
constexpr OpForm kOpForms[] = {
    {"record", OpKind::kRecord, 3},
    {"wait", OpKind::kWait, 3},
    {"copy", OpKind::kCopy, 5},
    {"copy2d", OpKind::kCopy2d, 8},
    {"call", OpKind::kCall, 3},
    {"fill", OpKind::kFill, 5},
    {"write_value", OpKind::kWriteValue, 4},
    {"wait_value", OpKind::kWaitValue, 4},
};

Op parse_fields(const nb::tuple& fields, OpKind kind) {
  Op op;
  op.kind = kind;
  op.stream = number<uint32_t>(fields, 1);
  switch (kind) {
    case OpKind::kRecord:
    case OpKind::kWait:
    case OpKind::kCall:
      op.index = number<uint32_t>(fields, 2);
      break;
    case OpKind::kCopy:
      op.destination = number<CUdeviceptr>(fields, 2);
      op.source = number<CUdeviceptr>(fields, 3);
      op.num_bytes = number<size_t>(fields, 4);
      break;
    case OpKind::kCopy2d:
      op.destination = number<CUdeviceptr>(fields, 2);
      op.destination_pitch = number<size_t>(fields, 3);
      op.source = number<CUdeviceptr>(fields, 4);
      op.source_pitch = number<size_t>(fields, 5);
      op.num_bytes = number<size_t>(fields, 6);
      op.rows = number<size_t>(fields, 7);
      break;
    case OpKind::kFill:
      op.destination = number<CUdeviceptr>(fields, 2);
      op.value = number<uint8_t>(fields, 3);
      op.num_bytes = number<size_t>(fields, 4);
      break;
    case OpKind::kWriteValue:
      op.destination = number<CUdeviceptr>(fields, 2);
      op.value = word(fields[3]);
      break;
    case OpKind::kWaitValue:
      op.source = number<CUdeviceptr>(fields, 2);
      op.value = word(fields[3]);
      break;
  }
  return op;
}

Op parse_op(nb::handle item, size_t index) {
  try {
    const auto fields = nb::cast<nb::tuple>(item);
    for (const OpForm& form : kOpForms) {
      if (fields.size() != form.length) continue;  // items of a tuple are not range-checked
      if (nb::cast<std::string>(fields[0]) == form.name) return parse_fields(fields, form.kind);
    }
  } catch (const nb::cast_error&) {  // said below, with the op itself
  }
  const std::string text = "op " + std::to_string(index) + " is not of any known form: " + nb::repr(item).c_str();
  throw nb::value_error(text.c_str());
}

std::vector<Op> parse_ops(const nb::sequence& items) {
  std::vector<Op> ops;
  ops.reserve(nb::len(items));
  for (nb::handle item : items) ops.push_back(parse_op(item, ops.size()));
  return ops;
}

void enqueue_python_call(Stream& stream, const nb::callable& function) {
  auto* call = new OneCall{function.inc_ref().ptr(), stream.errors()};
  try {
    const ReleasedGil released;
    stream.call(&run_one_call, call);
  } catch (...) {
    function.dec_ref();
    delete call;
    throw;
  }
}

ControlPage::Digest to_digest(const nb::bytes& bytes) {
  ControlPage::Digest digest{};
  if (bytes.size() != digest.size()) throw nb::value_error("a layout digest has 32 bytes");
  std::memcpy(digest.data(), bytes.data(), digest.size());
  return digest;
}

// The lock as a context manager, for captures that others make (torch.cuda.graph, recording on the host).
class HeldCaptureLock {
 public:
  explicit HeldCaptureLock(double lock_timeout_s) : lock_timeout_s_(lock_timeout_s) {}
  void enter() {
    if (lock_ != nullptr) throw nb::value_error("this capture lock is already held");
    const ReleasedGil released;
    lock_ = std::make_unique<CaptureLock>(lock_timeout_s_);
  }
  void exit() { lock_.reset(); }

 private:
  const double lock_timeout_s_;
  std::unique_ptr<CaptureLock> lock_;
};

void bind_driver(nb::module_& m) {
  nb::class_<Driver>(m, "Driver")
      .def(nb::new_([](const std::string& path, int device_index) {
             // Never deleted, see Note [drivers live for good].
             return std::shared_ptr<Driver>(&Driver::open(path, device_index), [](Driver*) {});
           }),
           "path"_a, "device_index"_a = 0)
      .def_prop_ro("path", &Driver::path)
      .def_prop_ro("version", &Driver::version)
      .def_prop_ro("is_host", &Driver::is_host)
      .def_prop_ro("device_name", &Driver::device_name)
      .def_prop_ro("total_bytes", &Driver::total_bytes)
      .def_prop_ro("free_bytes", &Driver::free_bytes)
      .def_prop_ro("granularity_bytes", &Driver::granularity_bytes)
      .def_prop_ro("num_retired",
                   [](Driver& driver) {
                     driver.enter();
                     driver.reap();
                     return driver.num_retired();
                   })
      .def("attribute", &Driver::attribute, "attribute"_a);
}

void bind_memory(nb::module_& m) {
  nb::class_<Memory>(m, "Memory", nb::type_slots(memory_slots))
      .def(nb::new_([](Driver& driver, size_t num_bytes, bool exportable) {
             const ReleasedGil released;
             return Memory::allocate(driver, num_bytes, exportable);
           }),
           "driver"_a, "num_bytes"_a, "exportable"_a = false)
      .def_static(
          "import_fd",
          [](Driver& driver, int fd, size_t num_bytes, bool read_only) {
            const ReleasedGil released;
            return Memory::import_fd(driver, fd, num_bytes, read_only);
          },
          "driver"_a, "fd"_a, "num_bytes"_a, "read_only"_a = true)
      .def_prop_ro("address", &Memory::address)
      .def_prop_ro("num_bytes", &Memory::num_bytes)
      .def_prop_ro("generation", &Memory::generation)
      .def_prop_ro("is_read_only", &Memory::is_read_only)
      .def("export_fd", &Memory::export_fd);
}

void bind_streams(nb::module_& m) {
  using Released = nb::call_guard<ReleasedGil>;
  nb::class_<Event>(m, "Event")
      .def(nb::new_([](Driver& driver, bool timing) { return std::make_shared<Event>(driver, timing); }), "driver"_a,
           "timing"_a = false)
      .def(
          "synchronize",
          [](const Event& event, double timeout_s) {
            return wait_bounded(timeout_s, [&](int64_t slice_ns) { return event.wait(slice_ns); });
          },
          "timeout_s"_a)
      .def("is_done", &Event::is_done)
      .def("elapsed_us", &Event::elapsed_us, "earlier"_a);
  nb::class_<Stream>(m, "Stream")
      .def(nb::new_([](Driver& driver) { return std::make_shared<Stream>(driver); }), "driver"_a)
      .def_prop_ro("handle", [](const Stream& stream) { return reinterpret_cast<uintptr_t>(stream.handle()->stream); })
      .def(
          "synchronize",
          [](const Stream& stream, double timeout_s) {
            return wait_bounded(timeout_s, [&](int64_t slice_ns) { return stream.wait_idle(slice_ns); });
          },
          "timeout_s"_a)
      .def("is_idle", &Stream::is_idle)
      .def("copy", &Stream::copy, "destination"_a, "source"_a, "num_bytes"_a, Released())
      .def("fill", &Stream::fill, "destination"_a, "value"_a, "num_bytes"_a, Released())
      .def(
          "write_value",
          [](Stream& stream, CUdeviceptr address, const nb::int_& value) { stream.write_value(address, word(value)); },
          "address"_a, "value"_a)
      .def(
          "wait_value",
          [](Stream& stream, CUdeviceptr address, const nb::int_& value) { stream.wait_value(address, word(value)); },
          "address"_a, "value"_a)
      .def("call", &enqueue_python_call, "function"_a)
      .def("check", [](Stream& stream) { stream.errors()->check(); })
      .def("record", &Stream::record, "event"_a, Released())
      .def("wait", &Stream::wait, "event"_a, Released());
}

void bind_lists(nb::module_& m) {
  using Released = nb::call_guard<ReleasedGil>;
  nb::class_<Calls>(m, "Calls")
      .def(nb::new_(&make_calls), "functions"_a)
      .def("__len__", &Calls::size)
      .def("check", &Calls::check);
  nb::class_<GraphExec>(m, "GraphExec")
      .def("launch", &GraphExec::launch, "stream"_a, Released())
      .def("upload", &GraphExec::upload, "stream"_a, Released());
  nb::class_<Graph>(m, "Graph")
      .def("num_nodes",
           [](const Graph& graph) {
             nb::dict by_kind;
             for (const auto& [kind, count] : graph.num_nodes()) by_kind[kind.c_str()] = count;
             return by_kind;
           })
      .def("instantiate", &Graph::instantiate, "executor"_a = "", "seed"_a = -1, Released());
  nb::class_<OpList>(m, "OpList")
      .def(nb::new_([](Driver& driver, const std::vector<std::shared_ptr<Stream>>& streams, size_t num_events,
                       const nb::sequence& ops) {
             return std::make_shared<OpList>(driver, streams, num_events, parse_ops(ops));
           }),
           "driver"_a, "streams"_a, "num_events"_a, "ops"_a)
      .def("__len__", &OpList::size)
      .def(
          "issue",
          [](OpList& list, const std::shared_ptr<Calls>& calls, size_t begin, int64_t end) {
            list.issue(calls, begin, end < 0 ? list.size() : static_cast<size_t>(end));
          },
          "calls"_a, "begin"_a = 0, "end"_a = -1, Released())
      .def("event_done", &OpList::event_done, "event"_a)
      .def(
          "wait_event",
          [](const OpList& list, size_t event, double timeout_s) {
            return wait_bounded(timeout_s, [&](int64_t slice_ns) { return list.wait_event(event, slice_ns); });
          },
          "event"_a, "timeout_s"_a)
      .def("capture", &OpList::capture, "calls"_a, "external_events"_a = OpList::ExternalEvents(),
           "lock_timeout_s"_a = 0.0, Released());
  nb::class_<HeldCaptureLock>(m, "CaptureLock")
      .def(nb::init<double>(), "lock_timeout_s"_a = 0.0)
      .def("__enter__", [](HeldCaptureLock& lock) { lock.enter(); })
      .def("__exit__", [](HeldCaptureLock& lock, const nb::args&) { lock.exit(); });
}

void bind_control_page(nb::module_& m) {
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

}  // namespace

}  // namespace graphshard

NB_MODULE(_core, m) {
  using namespace graphshard;
  nb::set_leak_warnings(false);  // a process may end with everything alive
  PyObject* driver_error = PyErr_NewException("graphshard._core.DriverError", PyExc_RuntimeError, nullptr);
  m.attr("DriverError") = nb::steal(driver_error);
  nb::register_exception_translator(&translate_driver_error, m.attr("DriverError").ptr());
  bind_driver(m);
  bind_memory(m);
  bind_streams(m);
  bind_lists(m);
  bind_control_page(m);
  m.def(
      "memcpy",
      [](uintptr_t destination, uintptr_t source, size_t num_bytes) {
        std::memcpy(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), num_bytes);
      },
      "destination"_a, "source"_a, "num_bytes"_a, nb::call_guard<ReleasedGil>());
  prepare_python_calls();
}
