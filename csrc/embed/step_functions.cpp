// The functions that a step brings along, over this copy of the runtime.
#include <algorithm>

#include "embed/guard.h"

namespace graphshard {

namespace {

std::atomic<RunFromOutside> run_from_outside{nullptr};

// Runs `function` as a call from outside. It must not throw.
template <typename Function>
void from_outside(Function& function) {
  const auto run = run_from_outside.load();
  if (run == nullptr) return function();
  run([](void* argument) { (*static_cast<Function*>(argument))(); }, &function);
}

// `use(step)` on the step of `self`, as a call from outside.
template <typename Use>
gs_status use_step(gs_step* self, ErrorText* error, const Use& use) {
  gs_status status = GS_OK;
  auto call = [&] { status = guarded(error, [&] { return use(*self->step); }); };
  from_outside(call);
  return status;
}

void retain(gs_step* self) { self->num_references.fetch_add(1, std::memory_order_relaxed); }

void release(gs_step* self) {
  auto call = [&] { release_step(self); };
  from_outside(call);
}

gs_status info(gs_step* self, gs_step_info* info, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    const StepParts& parts = step.parts();
    info->batch_size = parts.batch_size;
    info->tokens_per_sequence = parts.tokens_per_sequence;
    info->stream = parts.stream->handle()->stream;
    info->num_inputs = parts.inputs.size();
    info->num_outputs = parts.outputs.size();
    info->has_prefetch = parts.prefetch != nullptr && parts.entry != 0 ? 1 : 0;
    return GS_OK;
  });
}

const std::vector<NamedBuffer>& buffers(const Step& step, int is_output) {
  return is_output != 0 ? step.parts().outputs : step.parts().inputs;
}

gs_status give(const NamedBuffer& buffer, gs_tensor* tensor) {
  *tensor = gs_tensor{buffer.name.c_str(), buffer.address, buffer.num_bytes};
  return GS_OK;
}

gs_status buffer(gs_step* self, int is_output, const char* name, gs_tensor* tensor, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    std::string known;
    for (const NamedBuffer& one : buffers(step, is_output)) {
      if (one.name == name) return give(one, tensor);
      known += (known.empty() ? "" : ", ") + one.name;
    }
    throw NotFoundError("the step has no " + std::string(is_output != 0 ? "output" : "input") + " '" + name +
                        "'; known: " + (known.empty() ? "none" : known));
  });
}

gs_status buffer_at(gs_step* self, int is_output, size_t index, gs_tensor* tensor, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    const auto& all = buffers(step, is_output);
    if (index < all.size()) return give(all[index], tensor);
    throw std::out_of_range("buffer " + std::to_string(index) + " of " + std::to_string(all.size()) + " " +
                            (is_output != 0 ? "outputs" : "inputs"));
  });
}

gs_status replay(gs_step* self, void* stream, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    step.replay(static_cast<CUstream>(stream));
    return GS_OK;
  });
}

std::string late_text(const StepParts& parts, int64_t timeout_ns) {
  std::string text =
      "the outputs of step shape " + std::to_string(parts.batch_size) + "x" + std::to_string(parts.tokens_per_sequence);
  if (!parts.transport.empty()) text += " (transport " + parts.transport + ")";
  text += " did not come within " + std::to_string(timeout_ns / 1'000'000) + " ms";
  return text + (parts.needs_peers ? "; its gathers need all ranks: a peer may not have replayed it" : "");
}

gs_status wait(gs_step* self, int64_t timeout_ns, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    if (step.wait(timeout_ns)) return GS_OK;
    throw TimeoutError(late_text(step.parts(), timeout_ns));
  });
}

gs_status prefetch(gs_step* self, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    step.prefetch();
    return GS_OK;
  });
}

gs_status prefetch_wait(gs_step* self, int64_t timeout_ns, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    if (step.wait_prefetch(timeout_ns)) return GS_OK;
    throw TimeoutError("the prefetch did not end within " + std::to_string(timeout_ns / 1'000'000) + " ms");
  });
}

gs_status upload(gs_step* self, void* stream, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    step.upload(static_cast<CUstream>(stream));
    return GS_OK;
  });
}

gs_status epoch(gs_step* self, uint64_t* epoch, ErrorText* error) {
  return use_step(self, error, [&](Step& step) {
    *epoch = step.epoch();
    return GS_OK;
  });
}

constexpr StepFunctions kFunctions = {retain, release,  info,          buffer, buffer_at, replay,
                                      wait,   prefetch, prefetch_wait, upload, epoch};

}  // namespace

gs_step* new_step(StepParts parts) {
  auto made = std::make_unique<gs_step>();
  made->step = std::make_unique<Step>(std::move(parts));
  made->functions = &kFunctions;
  return made.release();
}

void release_step(gs_step* step) {
  if (step->num_references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete step;
}

void set_run_from_outside(RunFromOutside run) { run_from_outside.store(run); }

}  // namespace graphshard
