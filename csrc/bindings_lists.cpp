// Calls, op lists, graphs and the capture lock for Python.
#include "bindings.h"
#include "runtime/capture_lock.h"
#include "runtime/collective.h"
#include "runtime/op_list.h"
#include "runtime/recording.h"

namespace graphshard {

namespace {

template <typename Number>
Number number(const nb::tuple& op, size_t index) {
  return nb::cast<Number>(op[index]);
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
    {"values", OpKind::kValues, 3},
    {"all_gather", OpKind::kAllGather, 6},
    {"reduce_scatter", OpKind::kReduceScatter, 7},
};

void parse_collective(Op& op, const nb::tuple& fields) {
  op.index = number<uint32_t>(fields, 2);
  op.destination = number<CUdeviceptr>(fields, 3);
  op.source = number<CUdeviceptr>(fields, 4);
  if (op.kind == OpKind::kAllGather) {
    op.num_bytes = number<size_t>(fields, 5);
  } else {
    op.num_elements = number<size_t>(fields, 5);
    op.value = static_cast<uint32_t>(element_type(nb::cast<std::string>(fields[6])));
  }
}

// A driver takes no longer batch; an empty one is a mistake.
constexpr size_t kMaxBatch = 256;

std::vector<CUstreamBatchMemOpParams> parse_values(nb::handle items) {
  std::vector<CUstreamBatchMemOpParams> values;
  for (nb::handle item : items) values.push_back(value_op(nb::cast<nb::tuple>(item)));
  if (values.empty() || values.size() > kMaxBatch) {
    throw nb::value_error(("a batch of " + std::to_string(values.size()) + " values: 1 to 256 are possible").c_str());
  }
  return values;
}

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
    case OpKind::kValues:
      op.values = std::make_shared<const std::vector<CUstreamBatchMemOpParams>>(parse_values(fields[2]));
      break;
    case OpKind::kAllGather:
    case OpKind::kReduceScatter:
      parse_collective(op, fields);
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

const char* form_name(OpKind kind) {
  for (const OpForm& form : kOpForms) {
    if (form.kind == kind) return form.name;
  }
  return "unknown";
}

// (index, kind, stream, event or call or collective, destination, source, bytes moved in all)
nb::tuple describe_op(const BoundOps& ops, size_t index) {
  const Op& op = ops[index];
  return nb::make_tuple(index, form_name(op.kind), op.stream, op.index, op.destination, op.source,
                        ops.moved_bytes(index));
}

nb::list describe_spans(const std::vector<NodeSpan>& spans) {
  nb::list items;
  for (const NodeSpan& span : spans) items.append(nb::make_tuple(span.op, span.stream, span.begin, span.end));
  return items;
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

}  // namespace

void bind_lists(nb::module_& m) {
  using Released = nb::call_guard<ReleasedGil>;
  nb::class_<Calls>(m, "Calls")
      .def(nb::new_([](const nb::sequence& functions) { return make_calls(functions); }), "functions"_a)
      .def("__len__", &Calls::size)
      .def("check", &Calls::check);
  nb::class_<GraphExec>(m, "GraphExec")
      .def("launch", &GraphExec::launch, "stream"_a, Released())
      .def("upload", &GraphExec::upload, "stream"_a, Released());
  nb::class_<Graph>(m, "Graph")
      .def_static(
          "from_handle",
          [](Driver& driver, uintptr_t handle, const nb::object& owner) {
            return Graph::from_handle(driver, reinterpret_cast<CUgraph>(handle), keep_object(owner));
          },
          "driver"_a, "handle"_a, "owner"_a)
      .def("num_nodes",
           [](const Graph& graph) {
             nb::dict by_kind;
             for (const auto& [kind, count] : graph.num_nodes()) by_kind[kind.c_str()] = count;
             return by_kind;
           })
      .def_prop_ro("handle", [](const Graph& graph) { return reinterpret_cast<uintptr_t>(graph.handle()); })
      .def("spans", [](const Graph& graph) { return describe_spans(graph.spans()); })
      .def("instantiate", &Graph::instantiate, "executor"_a = "", "seed"_a = -1, Released());
  nb::class_<OpList>(m, "OpList")
      .def(nb::new_([](Driver& driver, const std::vector<std::shared_ptr<Stream>>& streams, size_t num_events,
                       const nb::sequence& ops, const BoundOps::Collectives& collectives) {
             return std::make_shared<OpList>(driver, streams, num_events, parse_ops(ops), collectives);
           }),
           "driver"_a, "streams"_a, "num_events"_a, "ops"_a, "collectives"_a = BoundOps::Collectives())
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
           "lock_timeout_s"_a = 0.0, Released())
      .def("recording", &OpList::recording, Released())
      .def("ops",
           [](const OpList& list) {
             nb::list items;
             for (size_t i = 0; i < list.size(); ++i) items.append(describe_op(list.ops(), i));
             return items;
           })
      .def("set_trace", &OpList::set_trace, "is_on"_a)
      .def("take_trace", [](OpList& list) {
        nb::list items;
        for (const size_t index : list.take_trace()) items.append(describe_op(list.ops(), index));
        return items;
      });
  nb::class_<Recording>(m, "Recording")
      .def("__len__", &Recording::size)
      .def("spans", [](const Recording& recording) { return describe_spans(recording.spans()); })
      .def(
          "issue",
          [](Recording& recording, const std::shared_ptr<Calls>& calls, size_t begin, int64_t end) {
            recording.issue(calls, begin, end < 0 ? recording.size() : static_cast<size_t>(end));
          },
          "calls"_a, "begin"_a = 0, "end"_a = -1, Released());
  nb::class_<HeldCaptureLock>(m, "CaptureLock")
      .def(nb::init<double>(), "lock_timeout_s"_a = 0.0)
      .def("__enter__", [](HeldCaptureLock& lock) { lock.enter(); })
      .def("__exit__", [](HeldCaptureLock& lock, const nb::args&) { lock.exit(); });
}

}  // namespace graphshard
