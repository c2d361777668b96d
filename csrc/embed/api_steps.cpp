// The C API of steps: each call goes to the functions that the step brought along.
#include <cstring>

#include "embed/handles.h"

namespace graphshard {

ErrorText& last_error() {
  thread_local ErrorText error{};
  return error;
}

namespace {

// `use(functions)` on a step that is one.
template <typename Use>
gs_status use(gs_step* step, const Use& use) {
  return api([&] {
    need(step, "step");
    return use(*step->functions);
  });
}

std::string shape_text(int64_t batch_size, int64_t tokens_per_sequence) {
  return std::to_string(batch_size) + "x" + std::to_string(tokens_per_sequence);
}

gs_step_info info_of(gs_step* step) {
  need(step, "a step of the set");
  gs_step_info info = GS_STEP_INFO_INIT;
  ErrorText error{};
  if (step->functions->info(step, &info, &error) != GS_OK) throw StateError(error.text);
  return info;
}

}  // namespace

}  // namespace graphshard

using namespace graphshard;

int gs_version(void) { return GS_VERSION; }

const char* gs_last_error(void) { return last_error().text; }

gs_status gs_step_open(uint64_t handle, gs_step** step) {
  return api([&] {
    need(step, "step");
    auto* found = reinterpret_cast<gs_step*>(static_cast<uintptr_t>(handle));
    if (found == nullptr || handle % alignof(gs_step) != 0 || found->magic.load() != kStepMagic) {
      throw std::invalid_argument("handle " + hex(handle) + " is no step: pass StepGraph.handle, while it is open");
    }
    if (found->abi != kStepAbi) {
      throw std::invalid_argument("the step is of version " + std::to_string(found->abi) + ", this library's is " +
                                  std::to_string(kStepAbi) + ": use the libgraphshard.so of the same package");
    }
    found->functions->retain(found);
    *step = found;
    return GS_OK;
  });
}

void gs_step_retain(gs_step* step) {
  if (step != nullptr) step->functions->retain(step);
}

void gs_step_release(gs_step* step) {
  if (step != nullptr) step->functions->release(step);
}

gs_status gs_step_get_info(gs_step* step, gs_step_info* info) {
  return use(step, [&](const StepFunctions& functions) {
    need(info, "info");
    check_size(info->size, sizeof(gs_step_info), "gs_step_info");
    return functions.info(step, info, &last_error());
  });
}

gs_status gs_step_input(gs_step* step, const char* name, gs_tensor* tensor) {
  return use(step, [&](const StepFunctions& functions) {
    need(name, "name");
    need(tensor, "tensor");
    return functions.buffer(step, 0, name, tensor, &last_error());
  });
}

gs_status gs_step_output(gs_step* step, const char* name, gs_tensor* tensor) {
  return use(step, [&](const StepFunctions& functions) {
    need(name, "name");
    need(tensor, "tensor");
    return functions.buffer(step, 1, name, tensor, &last_error());
  });
}

gs_status gs_step_input_at(gs_step* step, size_t index, gs_tensor* tensor) {
  return use(step, [&](const StepFunctions& functions) {
    need(tensor, "tensor");
    return functions.buffer_at(step, 0, index, tensor, &last_error());
  });
}

gs_status gs_step_output_at(gs_step* step, size_t index, gs_tensor* tensor) {
  return use(step, [&](const StepFunctions& functions) {
    need(tensor, "tensor");
    return functions.buffer_at(step, 1, index, tensor, &last_error());
  });
}

gs_status gs_steps_choose(gs_step* const* steps, size_t num_steps, int64_t batch_size, int64_t tokens_per_sequence,
                          gs_step** step) {
  return api([&] {
    need(step, "step");
    if (num_steps > 0) need(steps, "steps");
    gs_step* best = nullptr;
    int64_t best_batch_size = 0;
    std::string known;
    for (size_t i = 0; i < num_steps; ++i) {
      const gs_step_info info = info_of(steps[i]);
      known += (known.empty() ? "" : ", ") + shape_text(info.batch_size, info.tokens_per_sequence);
      if (info.batch_size < batch_size || info.tokens_per_sequence != tokens_per_sequence) continue;
      if (best != nullptr && info.batch_size >= best_batch_size) continue;
      best = steps[i];
      best_batch_size = info.batch_size;
    }
    if (best == nullptr) {
      throw NotFoundError("no captured step fits " + shape_text(batch_size, tokens_per_sequence) +
                          "; captured: " + (known.empty() ? "none" : known));
    }
    *step = best;
    return GS_OK;
  });
}

gs_status gs_step_replay(gs_step* step, void* stream) {
  return use(step, [&](const StepFunctions& functions) { return functions.replay(step, stream, &last_error()); });
}

gs_status gs_step_wait(gs_step* step, double timeout_s) {
  return use(
      step, [&](const StepFunctions& functions) { return functions.wait(step, timeout_ns(timeout_s), &last_error()); });
}

gs_status gs_step_prefetch(gs_step* step) {
  return use(step, [&](const StepFunctions& functions) { return functions.prefetch(step, &last_error()); });
}

gs_status gs_step_prefetch_wait(gs_step* step, double timeout_s) {
  return use(step, [&](const StepFunctions& functions) {
    return functions.prefetch_wait(step, timeout_ns(timeout_s), &last_error());
  });
}

gs_status gs_step_upload(gs_step* step, void* stream) {
  return use(step, [&](const StepFunctions& functions) { return functions.upload(step, stream, &last_error()); });
}

gs_status gs_step_epoch(gs_step* step, uint64_t* epoch) {
  return use(step, [&](const StepFunctions& functions) {
    need(epoch, "epoch");
    return functions.epoch(step, epoch, &last_error());
  });
}
