// Steps for embedding: what Python captured, for a server that replays it through csrc/include/graphshard.h.
#include <nanobind/stl/tuple.h>

#include "bindings.h"
#include "embed/step_abi.h"

namespace graphshard {

namespace {

using Buffers = std::vector<std::tuple<std::string, uintptr_t, size_t>>;

std::vector<NamedBuffer> to_buffers(const Buffers& given) {
  std::vector<NamedBuffer> buffers;
  for (const auto& [name, address, num_bytes] : given) buffers.push_back({name, address, num_bytes});
  return buffers;
}

// Python's reference to a step.
class EmbeddedStep {
 public:
  explicit EmbeddedStep(StepParts parts) : step_(new_step(std::move(parts))) {}
  ~EmbeddedStep() { release_step(step_); }
  EmbeddedStep(const EmbeddedStep&) = delete;
  EmbeddedStep& operator=(const EmbeddedStep&) = delete;

  uintptr_t handle() const { return reinterpret_cast<uintptr_t>(step_); }
  size_t num_references() const { return step_->num_references.load(); }

 private:
  gs_step* step_;
};

std::shared_ptr<EmbeddedStep> make_step(std::shared_ptr<GraphExec> exec, std::shared_ptr<Stream> stream,
                                        std::pair<int64_t, int64_t> shape, const Buffers& inputs,
                                        const Buffers& outputs, std::shared_ptr<Calls> calls,
                                        std::shared_ptr<StepOrder> order, std::shared_ptr<OpList> prefetch,
                                        std::shared_ptr<Stream> prefetch_stream, std::pair<uint64_t, uint64_t> slots,
                                        const Word* done, std::shared_ptr<ControlPage> page, const nb::sequence& keep,
                                        std::string transport, bool needs_peers) {
  StepParts parts;
  parts.exec = std::move(exec);
  parts.stream = std::move(stream);
  std::tie(parts.batch_size, parts.tokens_per_sequence) = shape;
  parts.inputs = to_buffers(inputs);
  parts.outputs = to_buffers(outputs);
  parts.calls = std::move(calls);
  parts.order = std::move(order);
  parts.prefetch = std::move(prefetch);
  parts.prefetch_stream = std::move(prefetch_stream);
  std::tie(parts.entry, parts.exit) = slots;
  if (done != nullptr) parts.done.emplace(*done);
  parts.page = std::move(page);
  parts.transport = std::move(transport);
  parts.needs_peers = needs_peers;
  for (nb::handle object : keep) parts.others.push_back(keep_object(object));
  return std::make_shared<EmbeddedStep>(std::move(parts));
}

}  // namespace

void bind_embed(nb::module_& m) {
  nb::class_<StepOrder>(m, "StepOrder")
      .def(nb::new_([](Driver& driver) { return std::make_shared<StepOrder>(driver); }), "driver"_a)
      .def("forget", &StepOrder::forget)
      .def("leave", &StepOrder::leave, "stream"_a, nb::call_guard<ReleasedGil>())
      .def(
          "synchronize",
          [](StepOrder& order, double timeout_s) {
            return wait_bounded(timeout_s, [&](int64_t slice_ns) { return order.wait(slice_ns); });
          },
          "timeout_s"_a)
      .def_prop_ro("num_replays", &StepOrder::replays)
      .def_prop_ro("num_uses", &StepOrder::uses);
  nb::class_<EmbeddedStep>(m, "Step")
      .def(nb::new_(&make_step), "exec"_a, "stream"_a, "shape"_a, "inputs"_a, "outputs"_a, "calls"_a = nb::none(),
           "order"_a = nb::none(), "prefetch"_a = nb::none(), "prefetch_stream"_a = nb::none(),
           "slots"_a = std::pair<uint64_t, uint64_t>(0, 0), "done"_a = nb::none(), "page"_a = nb::none(),
           "keep"_a = nb::tuple(), "transport"_a = "", "needs_peers"_a = false)
      .def_prop_ro("handle", &EmbeddedStep::handle)
      .def_prop_ro("num_references", &EmbeddedStep::num_references);
}

}  // namespace graphshard
