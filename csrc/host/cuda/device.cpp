#include "device.h"

#include <cstdio>
#include <cstring>

#include <pthread.h>

#include "guard.h"
#include "memory.h"
#include "work.h"

namespace graphshard::hostcuda {

namespace {

enum class State : int { kUninitialised, kReady, kForked };
std::atomic<State> state{State::kUninitialised};
thread_local std::vector<CUcontext> context_stack;

constexpr char kName[] = "graphshard host driver";
constexpr unsigned char kUuid[16] = {'g', 's', 'h', 'o', 's', 't', 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};

void mark_forked_child() {
  if (state.load() == State::kReady) state.store(State::kForked);
}

CUresult check_device(CUdevice device) { return device == kDevice ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }

}  // namespace

Process& process() {
  static auto* the_process = new Process;
  return *the_process;
}

CUresult enter() {
  // A forked child has neither the worker threads nor a consistent state: as on CUDA, it may call nothing.
  if (state.load(std::memory_order_acquire) != State::kReady) return CUDA_ERROR_NOT_INITIALIZED;
  return in_host_function() ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
}

CUresult enter_context() {
  GS_RETURN_IF_ERROR(enter());
  if (context_stack.empty() || context_stack.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const bool is_alive = process().primary.retained.load(std::memory_order_relaxed) > 0;
  return is_alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUcontext current_context() { return context_stack.empty() ? nullptr : context_stack.back(); }

CUresult init(unsigned int flags) {
  if (in_host_function()) return CUDA_ERROR_NOT_PERMITTED;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (state.load() == State::kForked) return CUDA_ERROR_NOT_INITIALIZED;  // its mutex may be held for ever
  const std::lock_guard lock(process().mutex);
  if (state.load() == State::kReady) return CUDA_SUCCESS;
  if (pthread_atfork(nullptr, nullptr, mark_forked_child) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  state.store(State::kReady);
  return CUDA_SUCCESS;
}

CUresult driver_get_version(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

CUresult device_get(CUdevice* device, int ordinal) {
  GS_RETURN_IF_ERROR(enter());
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  GS_RETURN_IF_ERROR(check_device(ordinal));
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult device_get_count(int* count) {
  GS_RETURN_IF_ERROR(enter());
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult device_get_name(char* name, int num_bytes, CUdevice device) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_device(device));
  if (name == nullptr || num_bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(name, static_cast<size_t>(num_bytes), "%s", kName);
  return CUDA_SUCCESS;
}

CUresult device_get_uuid(CUuuid* uuid, CUdevice device) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_device(device));
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(uuid->bytes, kUuid, sizeof(kUuid));
  return CUDA_SUCCESS;
}

CUresult device_total_mem(size_t* num_bytes, CUdevice device) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_device(device));
  if (num_bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *num_bytes = total_bytes();
  return CUDA_SUCCESS;
}

CUresult device_can_access_peer(int* can, CUdevice device, CUdevice peer) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_device(device));
  GS_RETURN_IF_ERROR(check_device(peer));
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *can = 0;  // as CUDA says of a device and itself
  return CUDA_SUCCESS;
}

CUresult primary_context_retain(CUcontext* context, CUdevice device) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_device(device));
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  process().primary.retained.fetch_add(1);
  *context = &process().primary;
  return CUDA_SUCCESS;
}

CUresult primary_context_release(CUdevice device) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_device(device));
  int retained = process().primary.retained.load();
  do {
    if (retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  } while (!process().primary.retained.compare_exchange_weak(retained, retained - 1));
  return CUDA_SUCCESS;
}

CUresult primary_context_get_state(CUdevice device, unsigned int* flags, int* is_active) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_device(device));
  if (flags == nullptr || is_active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = process().primary.flags;
  *is_active = process().primary.retained.load() > 0 ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult primary_context_set_flags(CUdevice device, unsigned int flags) {
  GS_RETURN_IF_ERROR(enter());
  GS_RETURN_IF_ERROR(check_device(device));
  if ((flags & ~static_cast<unsigned int>(CU_CTX_FLAGS_MASK)) != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(process().mutex);
  process().primary.flags = flags;
  return CUDA_SUCCESS;
}

CUresult context_get_current(CUcontext* context) {
  GS_RETURN_IF_ERROR(enter());
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = current_context();
  return CUDA_SUCCESS;
}

CUresult context_set_current(CUcontext context) {
  GS_RETURN_IF_ERROR(enter());
  if (context != nullptr && context != &process().primary) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context_stack.empty()) context_stack.pop_back();
  if (context != nullptr) context_stack.push_back(context);
  return CUDA_SUCCESS;
}

CUresult context_push_current(CUcontext context) {
  GS_RETURN_IF_ERROR(enter());
  if (context != &process().primary) return CUDA_ERROR_INVALID_CONTEXT;
  context_stack.push_back(context);
  return CUDA_SUCCESS;
}

CUresult context_pop_current(CUcontext* context) {
  GS_RETURN_IF_ERROR(enter());
  if (context_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = context_stack.back();
  context_stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult context_get_device(CUdevice* device) {
  GS_RETURN_IF_ERROR(enter_context());
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = kDevice;
  return CUDA_SUCCESS;
}

CUresult context_get_flags(unsigned int* flags) {
  GS_RETURN_IF_ERROR(enter_context());
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = process().primary.flags;
  return CUDA_SUCCESS;
}

CUresult context_get_api_version(CUcontext /*context*/, unsigned int* version) {
  GS_RETURN_IF_ERROR(enter_context());
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult context_get_id(CUcontext /*context*/, unsigned long long* id) {
  GS_RETURN_IF_ERROR(enter_context());
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *id = 1;
  return CUDA_SUCCESS;
}

CUresult context_get_stream_priority_range(int* least, int* greatest) {
  GS_RETURN_IF_ERROR(enter_context());
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CUDA_SUCCESS;
}

}  // namespace graphshard::hostcuda
