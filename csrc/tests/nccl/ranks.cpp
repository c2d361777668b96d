#include "ranks.h"

#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

namespace graphshard::litmus {

void run_ranks(int num_ranks, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        OK(cu.ctx_set_current(cu.context));
        body(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

void expect_nccl(int found, int expected, const char* call, const char* file, int line) {
  if (found == expected) return;
  fail(file, line,
       std::string(call) + " gave " + std::to_string(found) + ", not " + std::to_string(expected) + ": " +
           nc.get_last_error(nullptr));
}

ncclUniqueId new_unique_id() {
  ncclUniqueId id{};
  NCCL_OK(nc.get_unique_id(&id));
  return id;
}

nccl::Config zero_cta() {
  nccl::Config config;
  config.cta_policy = nccl::kCtaPolicyZero;
  return config;
}

Comm::Comm(const ncclUniqueId& id, int num_ranks, int rank, nccl::Config config) {
  NCCL_OK(nc.comm_init_rank_config(&comm_, num_ranks, id, rank, &config));
}

Comm::~Comm() {
  if (comm_ != nullptr) nc.comm_destroy(comm_);
}

int Comm::async_error() const {
  int result = -1;
  NCCL_OK(nc.comm_get_async_error(comm_, &result));
  return result;
}

int Comm::await_async_error() const {
  for (;;) {
    const int result = async_error();
    if (result != nccl::kSuccess) return result;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

NcclMemory::NcclMemory(size_t num_bytes, ncclComm_t comm) : comm_(comm) {
  NCCL_OK(nc.mem_alloc(&memory_, num_bytes));
  if (comm != nullptr) {
    NCCL_OK(nc.window_register(comm, memory_, num_bytes, &window_, nccl::kWindowCollSymmetric));
  }
}

NcclMemory::~NcclMemory() {
  if (window_ != nullptr) nc.window_deregister(comm_, window_);
  nc.mem_free(memory_);
}

namespace {

unsigned char byte_of(size_t index, int rank, int unit, int round) {
  return static_cast<unsigned char>(index * 7 + index / 251 + static_cast<size_t>(rank) * 61 +
                                    static_cast<size_t>(unit) * 17 + static_cast<size_t>(round) * 29);
}

}  // namespace

void fill_chunk(unsigned char* bytes, size_t num_bytes, int rank, int unit, int round) {
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = byte_of(i, rank, unit, round);
}

bool holds_unit(const unsigned char* bytes, size_t chunk_bytes, int num_ranks, int unit, int round) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < chunk_bytes; ++i) {
      if (bytes[static_cast<size_t>(rank) * chunk_bytes + i] != byte_of(i, rank, unit, round)) return false;
    }
  }
  return true;
}

int gather(const void* send, void* receive, size_t num_bytes, ncclComm_t comm, CUstream stream) {
  return nc.all_gather(send, receive, num_bytes, nccl::kUint8, comm, stream);
}

Staged::Staged(const char* spec) {
  if (nc.stage(spec) != 0) fail(__FILE__, __LINE__, std::string("not understood: ") + spec);
}

}  // namespace graphshard::litmus
