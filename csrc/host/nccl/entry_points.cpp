// The exported names: NCCL's entry points over communicators, and gshost_nccl_stage.
//
// A call that fails leaves its text where ncclGetLastError finds it: at the communicator, and for the process.
#include <chrono>
#include <mutex>
#include <new>
#include <string>
#include <thread>

#include "communicator.h"
#include "config.h"
#include "driver.h"
#include "gshost_nccl.h"
#include "handles.h"
#include "stage.h"

#define HOSTNCCL_EXPORT extern "C" __attribute__((visibility("default")))

namespace graphshard::hostnccl {

namespace {

Handles<ncclComm_t, Communicator>& communicators() {
  static auto* const all = new Handles<ncclComm_t, Communicator>;
  return *all;
}

Handles<void*, Allocation>& allocations() {
  static auto* const all = new Handles<void*, Allocation>;
  return *all;
}

struct ProcessError {
  std::mutex mutex;
  std::string text;
};

ProcessError& process_error() {
  static auto* const error = new ProcessError;
  return *error;
}

std::shared_ptr<Communicator> find(ncclComm_t comm) { return communicators().get(comm, "the communicator"); }

/// A failed call's text, kept for the process and for `comm` if it is one.
void keep_error(ncclComm_t comm, const std::string& text) {
  {
    const std::lock_guard lock(process_error().mutex);
    process_error().text = text;
  }
  try {
    if (comm != nullptr) find(comm)->set_last_error(text);
  } catch (const Failure&) {
    // A stale handle, which is what `text` says.
  }
}

template <typename Body>
int guarded(const char* entry_point, ncclComm_t comm, const Body& body) {
  const std::string where = std::string(entry_point) + ": ";
  try {
    body();
    return nccl::kSuccess;
  } catch (const Failure& failure) {
    keep_error(comm, where + failure.what());
    return failure.code();
  } catch (const std::bad_alloc&) {
    keep_error(comm, where + "no memory");
    return nccl::kSystemError;
  } catch (const std::exception& error) {
    keep_error(comm, where + error.what());
    return nccl::kInternalError;
  }
}

void require(bool condition, const char* text) {
  if (!condition) throw Failure(nccl::kInvalidArgument, text);
}

CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace

}  // namespace graphshard::hostnccl

namespace hostnccl = graphshard::hostnccl;
namespace nccl = graphshard::nccl;
using hostnccl::address_of;
using hostnccl::allocations;
using hostnccl::communicators;
using hostnccl::find;
using hostnccl::guarded;
using hostnccl::require;

HOSTNCCL_EXPORT int gshost_nccl_stage(const char* spec) { return hostnccl::set_stage(spec) ? 0 : -1; }

HOSTNCCL_EXPORT int gshost_nccl_stage_met(const char* name) {
  return name != nullptr && hostnccl::is_met(name) ? 1 : 0;
}

HOSTNCCL_EXPORT int ncclGetVersion(int* version) {
  return guarded("ncclGetVersion", nullptr, [&] {
    require(version != nullptr, "no place for the version");
    *version = hostnccl::stage().version;
    hostnccl::note_met("version");
  });
}

HOSTNCCL_EXPORT int ncclGetUniqueId(ncclUniqueId* id) {
  return guarded("ncclGetUniqueId", nullptr, [&] {
    require(id != nullptr, "no place for the unique id");
    *id = hostnccl::Segment::create();
  });
}

HOSTNCCL_EXPORT const char* ncclGetErrorString(int result) {
  switch (result) {
    case nccl::kSuccess:
      return "no error";
    case nccl::kUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case nccl::kSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case nccl::kInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case nccl::kInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case nccl::kInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case nccl::kRemoteError:
      return "remote process exited or there was a network error";
    case nccl::kInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

HOSTNCCL_EXPORT const char* ncclGetLastError(ncclComm_t comm) {
  thread_local std::string text;  // lent out until this thread asks again
  text.clear();
  guarded("ncclGetLastError", nullptr, [&] {
    if (comm != nullptr) text = find(comm)->last_error();
  });
  if (text.empty()) {
    const std::lock_guard lock(hostnccl::process_error().mutex);
    text = hostnccl::process_error().text;
  }
  return text.c_str();
}

HOSTNCCL_EXPORT int ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank,
                                           nccl::Config* config) {
  return guarded("ncclCommInitRankConfig", nullptr, [&] {
    require(comm != nullptr, "no place for the communicator");
    const hostnccl::Settings settings = hostnccl::parse_config(config);
    const auto fresh = std::make_shared<hostnccl::Communicator>(id, num_ranks, rank);
    const auto handle = reinterpret_cast<ncclComm_t>(fresh.get());
    communicators().add(handle, fresh);
    // Before the wait for the others, so that another thread can abort it.
    __atomic_store_n(comm, handle, __ATOMIC_RELEASE);
    try {
      fresh->join(settings);
    } catch (...) {
      __atomic_store_n(comm, ncclComm_t{nullptr}, __ATOMIC_RELEASE);
      fresh->leave();
      communicators().forget(handle);
      throw;
    }
  });
}

HOSTNCCL_EXPORT int ncclCommFinalize(ncclComm_t comm) {
  return guarded("ncclCommFinalize", comm, [&] { find(comm)->drain(); });
}

HOSTNCCL_EXPORT int ncclCommDestroy(ncclComm_t comm) {
  return guarded("ncclCommDestroy", comm, [&] {
    const auto ending = find(comm);
    ending->drain();
    communicators().take(comm, "the communicator");
    ending->leave();
  });
}

HOSTNCCL_EXPORT int ncclCommAbort(ncclComm_t comm) {
  return guarded("ncclCommAbort", comm, [&] {
    const auto ending = find(comm);
    if (hostnccl::stage().abort_hang) hostnccl::note_met("abort_hang");
    while (hostnccl::stage().abort_hang) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ending->abort();
    communicators().forget(comm);
  });
}

HOSTNCCL_EXPORT int ncclCommGetAsyncError(ncclComm_t comm, int* result) {
  return guarded("ncclCommGetAsyncError", comm, [&] {
    require(result != nullptr, "no place for the result");
    *result = find(comm)->async_error();
  });
}

HOSTNCCL_EXPORT int ncclMemAlloc(void** pointer, size_t num_bytes) {
  return guarded("ncclMemAlloc", nullptr, [&] {
    require(pointer != nullptr && num_bytes != 0, "no place for the pointer, or no bytes");
    hostnccl::enter_driver();
    const auto memory = std::make_shared<hostnccl::Allocation>(num_bytes);
    *pointer = reinterpret_cast<void*>(memory->address());
    allocations().add(*pointer, memory);
  });
}

HOSTNCCL_EXPORT int ncclMemFree(void* pointer) {
  return guarded("ncclMemFree", nullptr, [&] {
    if (pointer != nullptr) allocations().take(pointer, "the memory");
  });
}

HOSTNCCL_EXPORT int ncclCommWindowRegister(ncclComm_t comm, void* pointer, size_t num_bytes, ncclWindow_t* window,
                                           int flags) {
  return guarded("ncclCommWindowRegister", comm, [&] {
    require(window != nullptr && pointer != nullptr && num_bytes != 0, "a null pointer, or no bytes");
    require(flags == nccl::kWindowCollSymmetric, "the host NCCL has symmetric windows only (flag 1)");
    *window = find(comm)->register_window(address_of(pointer), num_bytes);
  });
}

HOSTNCCL_EXPORT int ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return guarded("ncclCommWindowDeregister", comm, [&] { find(comm)->deregister_window(window); });
}

HOSTNCCL_EXPORT int ncclAllGather(const void* send, void* receive, size_t send_count, int type, ncclComm_t comm,
                                  ncclStream_t stream) {
  return guarded("ncclAllGather", comm,
                 [&] { find(comm)->all_gather(address_of(send), address_of(receive), send_count, type, stream); });
}

HOSTNCCL_EXPORT int ncclReduceScatter(const void* send, void* receive, size_t receive_count, int type, int op,
                                      ncclComm_t comm, ncclStream_t stream) {
  return guarded("ncclReduceScatter", comm, [&] {
    find(comm)->reduce_scatter(address_of(send), address_of(receive), receive_count, type, op, stream);
  });
}
