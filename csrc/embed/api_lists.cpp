// The C API of op lists and of the steps that are captured from them.
#include <algorithm>

#include "embed/handles.h"

namespace graphshard {

namespace {

// A caller's communicator.
class CallerCollective final : public Collective {
 public:
  explicit CallerCollective(const gs_collective& functions)
      : functions_(functions), name_(functions.name == nullptr ? "collective" : functions.name) {
    if (functions.world_size < 1) throw std::invalid_argument("collective '" + name_ + "' has no ranks");
  }

  void all_gather(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream) override {
    if (functions_.all_gather == nullptr) throw CollectiveError("all_gather", -1, "'" + name_ + "' has no all_gather");
    check(functions_.all_gather(functions_.context, destination, source, num_bytes, stream), "all_gather");
  }
  void reduce_scatter(CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
                      CUstream stream) override {
    if (functions_.reduce_scatter == nullptr) {
      throw CollectiveError("reduce_scatter", -1, "'" + name_ + "' has no reduce_scatter");
    }
    check(functions_.reduce_scatter(functions_.context, destination, source, num_elements, static_cast<int>(type),
                                    stream),
          "reduce_scatter");
  }
  int world_size() const override { return functions_.world_size; }
  std::string name() const override { return name_; }

 private:
  void check(int code, const char* function) const {
    if (code == 0) return;
    throw CollectiveError(function, code,
                          std::string(function) + " of '" + name_ + "' failed with code " + std::to_string(code));
  }

  const gs_collective functions_;
  const std::string name_;
};

static_assert(GS_OP_RECORD == static_cast<int>(OpKind::kRecord) && GS_OP_WAIT == static_cast<int>(OpKind::kWait) &&
                  GS_OP_COPY == static_cast<int>(OpKind::kCopy) && GS_OP_COPY_2D == static_cast<int>(OpKind::kCopy2d) &&
                  GS_OP_CALL == static_cast<int>(OpKind::kCall) && GS_OP_FILL == static_cast<int>(OpKind::kFill) &&
                  GS_OP_WRITE_VALUE == static_cast<int>(OpKind::kWriteValue) &&
                  GS_OP_WAIT_VALUE == static_cast<int>(OpKind::kWaitValue) &&
                  GS_OP_ALL_GATHER == static_cast<int>(OpKind::kAllGather) &&
                  GS_OP_REDUCE_SCATTER == static_cast<int>(OpKind::kReduceScatter),
              "kinds have the same numbers on both sides");

[[noreturn]] void refuse(size_t index, const std::string& reason) {
  throw std::invalid_argument("op " + std::to_string(index) + ": " + reason);
}

Op to_op(const gs_op& given, size_t index, size_t num_calls) {
  if (given.kind >= GS_OP_COUNT) refuse(index, "kind " + std::to_string(given.kind) + " is unknown");
  Op op;
  op.kind = static_cast<OpKind>(given.kind);
  op.stream = given.stream;
  op.index = given.index;
  op.value = given.value;
  op.destination = given.destination;
  op.source = given.source;
  op.num_bytes = given.num_bytes;
  op.rows = given.rows;
  op.destination_pitch = given.destination_pitch;
  op.source_pitch = given.source_pitch;
  op.num_elements = given.num_elements;
  if (op.kind == OpKind::kFill && op.value > UINT8_MAX) refuse(index, "a fill's value is a byte");
  if (op.kind == OpKind::kCall && op.index >= num_calls) {
    refuse(index, "call " + std::to_string(op.index) + " of " + std::to_string(num_calls));
  }
  const bool is_narrow = std::min(op.destination_pitch, op.source_pitch) < op.num_bytes;
  if (op.kind == OpKind::kCopy2d && op.rows > 1 && is_narrow) {
    refuse(index, "a pitch is less than a row's " + std::to_string(op.num_bytes) + " bytes");
  }
  const bool is_type = op.value == GS_FLOAT16 || op.value == GS_FLOAT32 || op.value == GS_BFLOAT16;
  if (op.kind == OpKind::kReduceScatter && !is_type) refuse(index, "a reduce-scatter's value is a gs_type");
  return op;
}

std::shared_ptr<Calls> to_calls(const gs_list_desc& desc) {
  std::vector<std::pair<Calls::Function, void*>> functions;
  for (size_t i = 0; i < desc.num_calls; ++i) {
    need(desc.calls[i].function, "a call's function");
    functions.emplace_back(desc.calls[i].function, desc.calls[i].argument);
  }
  return std::make_shared<Calls>(std::move(functions), std::make_shared<CallErrors>(), nullptr);
}

void check_arrays(const gs_list_desc& desc) {
  if (desc.num_streams > 0) need(desc.streams, "streams");
  if (desc.num_ops > 0) need(desc.ops, "ops");
  if (desc.num_calls > 0) need(desc.calls, "calls");
  if (desc.num_collectives > 0) need(desc.collectives, "collectives");
}

std::unique_ptr<gs_list> make_list(Driver& driver, const gs_list_desc& desc) {
  check_size(desc.size, sizeof(gs_list_desc), "gs_list_desc");
  check_arrays(desc);
  if (desc.num_events > UINT32_MAX) throw std::invalid_argument("num_events: an op names one by 32 bits");
  BoundOps::Streams streams;
  for (size_t i = 0; i < desc.num_streams; ++i) {
    need(desc.streams[i], "a stream");
    streams.push_back(desc.streams[i]->stream);
  }
  std::vector<Op> ops;
  for (size_t i = 0; i < desc.num_ops; ++i) ops.push_back(to_op(desc.ops[i], i, desc.num_calls));
  BoundOps::Collectives collectives;
  for (size_t i = 0; i < desc.num_collectives; ++i) {
    collectives.push_back(std::make_shared<CallerCollective>(desc.collectives[i]));
  }
  auto list = std::make_shared<OpList>(driver, streams, desc.num_events, std::move(ops), std::move(collectives));
  return std::make_unique<gs_list>(gs_list{&driver, streams[0], std::move(list), to_calls(desc)});
}

std::vector<NamedBuffer> to_buffers(const gs_tensor* tensors, size_t num_tensors) {
  if (num_tensors > 0) need(tensors, "inputs or outputs");
  std::vector<NamedBuffer> buffers;
  for (size_t i = 0; i < num_tensors; ++i) {
    need(tensors[i].name, "a buffer's name");
    buffers.push_back({tensors[i].name, tensors[i].address, tensors[i].num_bytes});
  }
  return buffers;
}

StepParts to_parts(const gs_list& list, const gs_step_desc& desc) {
  StepParts parts;
  parts.stream = list.origin;
  parts.batch_size = desc.batch_size;
  parts.tokens_per_sequence = desc.tokens_per_sequence;
  parts.inputs = to_buffers(desc.inputs, desc.num_inputs);
  parts.outputs = to_buffers(desc.outputs, desc.num_outputs);
  // A step keeps the memory of its buffers, though its list may not name all of them.
  for (const auto* buffers : {&parts.inputs, &parts.outputs}) {
    for (const NamedBuffer& buffer : *buffers) {
      parts.others.push_back(list.driver->find_memory(buffer.address, buffer.num_bytes, false, "gs_step_capture"));
    }
  }
  parts.calls = list.calls;
  if (desc.order != nullptr) parts.order = desc.order->order;
  if (desc.prefetch != nullptr) {
    parts.prefetch = desc.prefetch->list;
    parts.prefetch_stream = desc.prefetch->origin;
  }
  parts.entry = desc.entry;
  parts.exit = desc.exit;
  if (desc.done != nullptr) parts.done.emplace(desc.done->memory, 0);
  return parts;
}

}  // namespace

}  // namespace graphshard

using namespace graphshard;

gs_status gs_list_create(gs_driver* driver, const gs_list_desc* desc, gs_list** list) {
  return api([&] {
    need(driver, "driver");
    need(desc, "desc");
    need(list, "list");
    *list = make_list(*driver->driver, *desc).release();
    return GS_OK;
  });
}

gs_status gs_list_issue(gs_list* list, size_t begin, size_t end) {
  return api([&] {
    need(list, "list");
    list->list->issue(list->calls, begin, end);
    return GS_OK;
  });
}

void gs_list_release(gs_list* list) { delete list; }

gs_status gs_order_create(gs_driver* driver, gs_order** order) {
  return api([&] {
    need(driver, "driver");
    need(order, "order");
    *order = new gs_order{std::make_shared<StepOrder>(*driver->driver)};
    return GS_OK;
  });
}

void gs_order_forget(gs_order* order) {
  if (order != nullptr) order->order->forget();
}

void gs_order_release(gs_order* order) { delete order; }

gs_status gs_step_capture(gs_list* list, const gs_step_desc* desc, gs_step** step) {
  return api([&] {
    need(list, "list");
    need(desc, "desc");
    need(step, "step");
    check_size(desc->size, sizeof(gs_step_desc), "gs_step_desc");
    const double lock_timeout_s = static_cast<double>(timeout_ns(desc->lock_timeout_s)) / 1e9;
    StepParts parts = to_parts(*list, *desc);
    const std::string executor = desc->executor == nullptr ? "" : desc->executor;
    parts.exec = list->list->capture(list->calls, {}, lock_timeout_s)->instantiate(executor, -1);
    *step = new_step(std::move(parts));
    return GS_OK;
  });
}
