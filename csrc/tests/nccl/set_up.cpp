// What surrounds collectives: versions, configurations, registration, first use.
#include <chrono>
#include <string>
#include <thread>

#include "ranks.h"

using namespace graphshard::litmus;
namespace nccl = graphshard::nccl;

namespace {

constexpr size_t kBytes = 8192;

int try_register(ncclComm_t comm, void* memory, size_t num_bytes, ncclWindow_t* window) {
  return nc.window_register(comm, memory, num_bytes, window, nccl::kWindowCollSymmetric);
}

bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

// What the loaded library says, which tests may choose.
LITMUS(the_version_is_the_staged_one) {
  int version = 0;
  NCCL_OK(nc.get_version(&version));
  EQUAL(nccl::version_code(2, 32, 3), version);
  const Staged staged("version=22809");
  NCCL_OK(nc.get_version(&version));
  EQUAL(22809, version);
  TRUE(std::string(nc.get_error_string(nccl::kInvalidUsage)) != nc.get_error_string(nccl::kInvalidArgument));
}

LITMUS(stages_that_are_not_understood_change_nothing) {
  const Staged staged("version=22809; null_window");
  for (const char* spec : {"version=", "version=22809x", "skip", "skip:rank=1", "skip:rank=1,call=0",
                           "swap:rank=-1,call=2", "null_windows", "missing=ncclCommWindowRegister"}) {
    EQUAL(-1, nc.stage(spec));
  }
  int version = 0;
  NCCL_OK(nc.get_version(&version));
  EQUAL(22809, version);
}

LITMUS(configurations_are_checked) {
  const ncclUniqueId id = new_unique_id();
  ncclComm_t comm = nullptr;
  const auto expect_refused = [&](nccl::Config config, const char* part) {
    NCCL_EXPECT(nccl::kInvalidArgument, nc.comm_init_rank_config(&comm, 1, id, 0, &config));
    TRUE(mentions(nc.get_last_error(nullptr), part));
  };
  nccl::Config config;
  config.magic = 1;
  expect_refused(config, "magic");
  config = {};
  config.size = 3;
  expect_refused(config, "3 bytes");
  config = {};
  config.version = nccl::version_code(2, 99, 0);
  expect_refused(config, "29900");
  config = {};
  config.blocking = 0;
  expect_refused(config, "blocking");
  config = {};
  config.cta_policy = 9;
  expect_refused(config, "CTAPolicy 9");
  for (const int rank : {-1, 1}) {
    config = {};
    NCCL_EXPECT(nccl::kInvalidArgument, nc.comm_init_rank_config(&comm, 1, id, rank, &config));
  }
  ncclUniqueId zeros{};
  NCCL_EXPECT(nccl::kInvalidArgument, nc.comm_init_rank_config(&comm, 1, zeros, 0, &config));
  // A later version's configuration is longer; what this one does not know is left alone.
  struct Longer {
    nccl::Config known;
    int more[10] = {};
  } longer;
  longer.known.size = sizeof(longer);
  NCCL_OK(nc.comm_init_rank_config(&comm, 1, id, 0, &longer.known));
  NCCL_OK(nc.comm_destroy(comm));
  NCCL_EXPECT(nccl::kInvalidArgument, nc.comm_destroy(comm));  // a stale handle is an error
}

LITMUS(a_rank_is_taken_once) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Comm comm(id, 2, self);
    ncclComm_t second = nullptr;
    nccl::Config config;
    NCCL_EXPECT(nccl::kInvalidArgument, nc.comm_init_rank_config(&second, 2, id, self, &config));
    TRUE(mentions(nc.get_last_error(nullptr), "used before"));
  });
}

// Registration that cannot be symmetric fails on every rank, and what is there stays.
LITMUS(registration_is_checked_on_all_ranks) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Comm comm(id, 2, self);
    const NcclMemory memory(4 * kBytes);
    const Pinned plain(kBytes);
    ncclWindow_t window = nullptr;
    // Other sizes are another order.
    NCCL_EXPECT(nccl::kInvalidArgument, try_register(comm, memory.bytes(), self == 0 ? kBytes : 2 * kBytes, &window));
    TRUE(mentions(comm.last_error(), "16384"));
    // One rank's problem is everybody's.
    NCCL_EXPECT(nccl::kInvalidArgument,
                try_register(comm, self == 0 ? plain.bytes() : memory.bytes(), kBytes, &window));
    NCCL_EXPECT(nccl::kInvalidArgument, try_register(comm, memory.bytes(self == 0 ? 64 : 0), kBytes, &window));
    NCCL_OK(try_register(comm, memory.bytes(), kBytes, &window));
    TRUE(window != nullptr);
    // One buffer registered twice.
    ncclWindow_t again = nullptr;
    NCCL_EXPECT(nccl::kInvalidArgument, try_register(comm, memory.bytes(), kBytes, &again));
    TRUE(mentions(comm.last_error(), "registered already"));
    NCCL_OK(try_register(comm, memory.bytes(kBytes), kBytes, &again));  // another part is another window
    NCCL_OK(nc.window_deregister(comm, window));
    NCCL_EXPECT(nccl::kInvalidArgument, nc.window_deregister(comm, window));
    NCCL_OK(try_register(comm, memory.bytes(), kBytes, &window));
  });
}

LITMUS(ranks_in_unlike_calls_are_told) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Stream stream;
    const Comm comm(id, 2, self);
    const NcclMemory memory(4 * kBytes);
    ncclWindow_t window = nullptr;
    if (self == 0) {
      NCCL_EXPECT(nccl::kInvalidUsage, try_register(comm, memory.bytes(), kBytes, &window));
      TRUE(mentions(comm.last_error(), "rank 1 is in its first collective"));
    } else {
      NCCL_EXPECT(nccl::kInvalidUsage, gather(memory.bytes(), memory.bytes(kBytes), 64, comm, stream));
      TRUE(mentions(comm.last_error(), "rank 0 is in ncclCommWindowRegister"));
    }
  });
}

// Success and no window; gathers from such a buffer are the fall-back's.
LITMUS(a_staged_null_window_is_success) {
  const Staged staged("null_window");
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Comm comm(id, 2, self);
    const NcclMemory memory(kBytes, comm);
    TRUE(memory.window() == nullptr);
  });
}

// Set-up that a capture forbids is refused by name, and the capture is none the worse.
LITMUS(first_use_in_a_capture_is_refused) {
  const ncclUniqueId id = new_unique_id();
  run_ranks(2, [&](int self) {
    const Stream stream;
    const Comm comm(id, 2, self);
    const NcclMemory send(kBytes, comm);
    const NcclMemory receive(2 * kBytes, comm);
    const NcclMemory other(2 * kBytes);
    {
      OpenCapture capture(stream);
      NCCL_EXPECT(nccl::kInvalidUsage, gather(send.bytes(), receive.bytes(), kBytes, comm, stream));
      TRUE(mentions(comm.last_error(), "capture"));
      OK(capture.end());
    }
    NCCL_OK(gather(send.bytes(), receive.bytes(), kBytes, comm, stream));
    OpenCapture capture(stream);
    NCCL_OK(gather(send.bytes(), receive.bytes(), kBytes, comm, stream));
    // A reduction needs staging memory, which it would have made outside.
    NCCL_EXPECT(nccl::kInvalidUsage,
                nc.reduce_scatter(other.bytes(), other.bytes(kBytes), 16, nccl::kFloat32, nccl::kSum, comm, stream));
    OK(capture.end());
    OK(cu.stream_synchronize(stream));
  });
}

LITMUS(arguments_are_checked) {
  const Stream stream;
  const Comm comm(new_unique_id(), 1, 0);
  const NcclMemory memory(kBytes);
  NCCL_EXPECT(nccl::kInvalidArgument, nc.all_gather(memory.bytes(), memory.bytes(), 1, 99, comm, stream));
  NCCL_EXPECT(nccl::kInvalidArgument, nc.all_gather(nullptr, memory.bytes(), 1, nccl::kUint8, comm, stream));
  NCCL_OK(nc.all_gather(nullptr, nullptr, 0, nccl::kUint8, comm, stream));
  NCCL_EXPECT(nccl::kInvalidArgument,
              nc.reduce_scatter(memory.bytes(), memory.bytes(), 1, nccl::kInt8, nccl::kSum, comm, stream));
  NCCL_EXPECT(nccl::kInvalidArgument, nc.all_gather(memory.bytes(), memory.bytes(), 1, nccl::kUint8, nullptr, stream));
  NCCL_EXPECT(nccl::kInvalidArgument, nc.mem_free(memory.bytes(64)));
  // The driver's own errors come through, named.
  NCCL_EXPECT(nccl::kUnhandledCudaError,
              nc.all_gather(memory.bytes(), memory.bytes(64), 1, nccl::kUint8, comm, nullptr));
  TRUE(mentions(comm.last_error(), "CUDA_ERROR"));
}
