// Our declarations of NCCL's ABI against a real nccl.h: it compiles, or they differ. Compiled by
// tests/device/test_device_nccl_abi.py where that header is installed, with stubs for the CUDA runtime's.
#include <cstddef>
#include <type_traits>

#define ncclUniqueId VendorUniqueId  // both declare it in the global namespace
#include <nccl.h>
#undef ncclUniqueId

#include "nccl/abi.h"

namespace ours = graphshard::nccl;

#define SAME_FIELD(field, theirs)                                                                       \
  static_assert(offsetof(ours::Config, field) == offsetof(ncclConfig_t, theirs), "offset of " #theirs); \
  static_assert(std::is_same_v<decltype(ours::Config::field), decltype(ncclConfig_t::theirs)>, "type of " #theirs)

SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cga_cluster_size, cgaClusterSize);
SAME_FIELD(min_ctas, minCTAs);
SAME_FIELD(max_ctas, maxCTAs);
SAME_FIELD(net_name, netName);
SAME_FIELD(split_share, splitShare);
SAME_FIELD(traffic_class, trafficClass);
SAME_FIELD(comm_name, commName);
SAME_FIELD(collnet_enable, collnetEnable);
SAME_FIELD(cta_policy, CTAPolicy);
SAME_FIELD(shrink_share, shrinkShare);
SAME_FIELD(nvls_ctas, nvlsCTAs);
SAME_FIELD(n_channels_per_net_peer, nChannelsPerNetPeer);
SAME_FIELD(nvlink_centric_sched, nvlinkCentricSched);
static_assert(sizeof(ours::Config) <= sizeof(ncclConfig_t), "fields are only ever appended");

static_assert(sizeof(ncclUniqueId) == sizeof(VendorUniqueId) && alignof(ncclUniqueId) == alignof(VendorUniqueId));

constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
static_assert(ours::Config().magic == kTheirs.magic);
static_assert(ours::Config().blocking == kTheirs.blocking && ours::Config().cta_policy == kTheirs.CTAPolicy);
static_assert(ours::Config().net_name == kTheirs.netName && ours::Config().comm_name == kTheirs.commName);
static_assert(ours::kWindowCollSymmetric == NCCL_WIN_COLL_SYMMETRIC);
static_assert(ours::kWindowAlignmentBytes == NCCL_WIN_REQUIRED_ALIGNMENT);
static_assert(ours::kCtaPolicyZero == NCCL_CTA_POLICY_ZERO);
static_assert(ours::version_code(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH) == NCCL_VERSION_CODE);

// Compared as numbers: the types are enums of one side each.
#define SAME_VALUE(value, theirs) static_assert(static_cast<int>(ours::value) == static_cast<int>(theirs), #theirs)

SAME_VALUE(kSuccess, ncclSuccess);
SAME_VALUE(kUnhandledCudaError, ncclUnhandledCudaError);
SAME_VALUE(kSystemError, ncclSystemError);
SAME_VALUE(kInternalError, ncclInternalError);
SAME_VALUE(kInvalidArgument, ncclInvalidArgument);
SAME_VALUE(kInvalidUsage, ncclInvalidUsage);
SAME_VALUE(kRemoteError, ncclRemoteError);
SAME_VALUE(kInProgress, ncclInProgress);
SAME_VALUE(kInt8, ncclInt8);
SAME_VALUE(kUint8, ncclUint8);
SAME_VALUE(kInt32, ncclInt32);
SAME_VALUE(kFloat16, ncclFloat16);
SAME_VALUE(kFloat32, ncclFloat32);
SAME_VALUE(kBfloat16, ncclBfloat16);
SAME_VALUE(kSum, ncclSum);

// A type of theirs as ours: enums travel as ints.
template <typename T, bool is_enum = std::is_enum_v<T>>
struct Ours {
  using Type = T;
};
template <typename T>
struct Ours<T, true> {
  static_assert(sizeof(T) == sizeof(int));
  using Type = int;
};
template <>
struct Ours<ncclResult_t*> {
  using Type = int*;
};
template <>
struct Ours<VendorUniqueId> {
  using Type = ncclUniqueId;
};
template <>
struct Ours<VendorUniqueId*> {
  using Type = ncclUniqueId*;
};
template <>
struct Ours<ncclConfig_t*> {
  using Type = ours::Config*;
};
template <typename Result, typename... Arguments>
struct Ours<Result (*)(Arguments...), false> {
  using Type = typename Ours<Result>::Type (*)(typename Ours<Arguments>::Type...);
};

#define SAME_CALL(type, theirs) \
  static_assert(std::is_same_v<ours::type, Ours<decltype(&theirs)>::Type>, "signature of " #theirs)

SAME_CALL(GetVersion, ncclGetVersion);
SAME_CALL(GetUniqueId, ncclGetUniqueId);
SAME_CALL(GetErrorString, ncclGetErrorString);
SAME_CALL(GetLastError, ncclGetLastError);
SAME_CALL(CommInitRankConfig, ncclCommInitRankConfig);
SAME_CALL(CommFinalize, ncclCommFinalize);
SAME_CALL(CommDestroy, ncclCommDestroy);
SAME_CALL(CommAbort, ncclCommAbort);
SAME_CALL(CommGetAsyncError, ncclCommGetAsyncError);
SAME_CALL(MemAlloc, ncclMemAlloc);
SAME_CALL(MemFree, ncclMemFree);
SAME_CALL(CommWindowRegister, ncclCommWindowRegister);
SAME_CALL(CommWindowDeregister, ncclCommWindowDeregister);
SAME_CALL(AllGather, ncclAllGather);
SAME_CALL(ReduceScatter, ncclReduceScatter);
