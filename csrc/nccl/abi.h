// NCCL's C ABI, declared here: nccl.h does not compile without the CUDA runtime's headers, and the library that is
// loaded decides what is there. Layouts as in 2.28.9 and 2.32.3; csrc/tests checks them against a real nccl.h where one
// is installed.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

extern "C" {

using ncclComm_t = struct ncclComm*;
using ncclWindow_t = struct ncclWindow_vidmem*;
using ncclStream_t = struct CUstream_st*;

struct ncclUniqueId {
  char internal[128];
};
}

namespace graphshard::nccl {

// Values of ncclResult_t.
enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

// Values of ncclDataType_t and ncclRedOp_t that are used here.
enum DataType : int { kInt8 = 0, kUint8 = 1, kInt32 = 2, kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };
enum RedOp : int { kSum = 0 };

constexpr int kWindowCollSymmetric = 1;
constexpr size_t kWindowAlignmentBytes = 4096;
constexpr int kCtaPolicyZero = 2;

constexpr unsigned int kConfigMagic = 0xcafebeef;
constexpr int kUndefinedInt = INT_MIN;

// X.Y.Z as NCCL writes it, from 2.9 on.
constexpr int version_code(int major, int minor, int patch) { return major * 10000 + minor * 100 + patch; }

// ncclConfig_t of 2.28.9. Later versions append fields; they read no further than `size` says.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = kConfigMagic;
  unsigned int version = version_code(2, 28, 9);
  int blocking = kUndefinedInt;
  int cga_cluster_size = kUndefinedInt;
  int min_ctas = kUndefinedInt;
  int max_ctas = kUndefinedInt;
  const char* net_name = nullptr;
  int split_share = kUndefinedInt;
  int traffic_class = kUndefinedInt;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefinedInt;
  int cta_policy = kUndefinedInt;
  int shrink_share = kUndefinedInt;
  int nvls_ctas = kUndefinedInt;
  int n_channels_per_net_peer = kUndefinedInt;
  int nvlink_centric_sched = kUndefinedInt;
};
static_assert(sizeof(Config) == 80 && offsetof(Config, net_name) == 32 && offsetof(Config, comm_name) == 48 &&
                  offsetof(Config, cta_policy) == 60 && offsetof(Config, nvlink_centric_sched) == 76,
              "the layout of 2.28.9");

// The entry points that are used, by their exported names.
using GetVersion = int (*)(int* version);
using GetUniqueId = int (*)(ncclUniqueId* id);
using GetErrorString = const char* (*)(int result);
using GetLastError = const char* (*)(ncclComm_t comm);
using CommInitRankConfig = int (*)(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank, Config* config);
using CommFinalize = int (*)(ncclComm_t comm);
using CommDestroy = int (*)(ncclComm_t comm);
using CommAbort = int (*)(ncclComm_t comm);
using CommGetAsyncError = int (*)(ncclComm_t comm, int* result);
using MemAlloc = int (*)(void** pointer, size_t num_bytes);
using MemFree = int (*)(void* pointer);
using CommWindowRegister = int (*)(ncclComm_t comm, void* pointer, size_t num_bytes, ncclWindow_t* window, int flags);
using CommWindowDeregister = int (*)(ncclComm_t comm, ncclWindow_t window);
using AllGather = int (*)(const void* send, void* receive, size_t send_count, int type, ncclComm_t comm,
                          ncclStream_t stream);
using ReduceScatter = int (*)(const void* send, void* receive, size_t receive_count, int type, int op, ncclComm_t comm,
                              ncclStream_t stream);

}  // namespace graphshard::nccl
