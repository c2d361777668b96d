// One rank's end of an NCCL communicator that uses no SM: zero-CTA policy, symmetric windows, and no unbounded call.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nccl/comm_state.h"
#include "runtime/collective.h"
#include "runtime/memory.h"
#include "runtime/stream.h"

namespace graphshard {

class Communicator final : public Collective {
 public:
  // Collective. All calls with a limit run on a helper thread: a limit that passes is an NcclError naming the call, and
  // leaves the communicator broken (Note [calls left behind]).
  static std::shared_ptr<Communicator> open(std::shared_ptr<NcclLibrary> library, const ncclUniqueId& id,
                                            int world_size, int rank, const std::string& name, const Limit& limit);
  ~Communicator() override;

  // What ncclMemAlloc gave, in whole granules: it keeps the library, not this communicator.
  struct Loan {
    CUdeviceptr address;
    size_t num_bytes;
    size_t reserved_bytes;
    std::shared_ptr<void> lender;
  };
  Loan borrow(size_t num_bytes, const Limit& limit);
  // That as memory of the driver, zeroed.
  std::shared_ptr<Memory> adopt(Loan loan) const;
  // Collective, in the same order on all ranks. A window is a whole memory, which is kept until it is deregistered.
  void register_window(const Memory& memory, const Limit& limit);
  void deregister_window(const Memory& memory, const Limit& limit);

  // For op lists: on the calling thread, which may be capturing `stream`.
  void all_gather(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, CUstream stream) override;
  void reduce_scatter(CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
                      CUstream stream) override;
  // Eagerly, with addresses looked up; on a helper if there is a limit, as the first one of a communicator should be:
  // it sets connections up and waits for peers there.
  void all_gather(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes, const Stream& stream,
                  const std::optional<Limit>& limit);
  void reduce_scatter(CUdeviceptr destination, CUdeviceptr source, size_t num_elements, ElementType type,
                      const Stream& stream, const std::optional<Limit>& limit);

  std::shared_ptr<void> hold() override;
  // Before `destroy` and `deregister_window`, which refuse while a graph holds this communicator: lets dropped graphs
  // go whose work may still be running. False if some might still go after `timeout_ns`; true if waiting is of no use.
  bool wait_unheld(int64_t timeout_ns) const;
  // What went wrong since, or why this communicator is refusing calls; nothing if all is well. From any thread.
  std::optional<std::string> async_error();

  // Local; from any thread, also while another call is stuck. False if it has not ended in time: it goes on, and a
  // later call waits for it again.
  bool abort(const Limit& limit);
  // Begins to abort, without waiting: so several communicators end in parallel.
  void begin_abort();
  // Windows that are left, then the communicator. Collective. False as above; the communicator is broken then.
  bool destroy(const Limit& limit);

  bool is_broken() const { return state_->is_broken(); }
  int rank() const { return state_->rank; }
  int world_size() const override { return state_->world_size; }
  std::string name() const override { return state_->name; }

 private:
  explicit Communicator(std::shared_ptr<CommState> state) : state_(std::move(state)) {}

  void check_unheld(const char* entry_point) const;
  void begin_destroy();
  bool wait_for_end(const Limit& limit, const char* entry_point);

  std::shared_ptr<CommState> state_;
};

}  // namespace graphshard
