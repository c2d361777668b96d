// NCCL's entry points, loaded by path, and what the loaded library says of itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nccl/abi.h"
#include "runtime/collective.h"
#include "runtime/driver.h"

namespace graphshard {

// `code` is an ncclResult_t.
using NcclError = CollectiveError;

// As X(exported name, its type in abi.h).
#define GRAPHSHARD_NCCL_ENTRY_POINTS(X)             \
  X(ncclGetVersion, GetVersion)                     \
  X(ncclGetUniqueId, GetUniqueId)                   \
  X(ncclGetErrorString, GetErrorString)             \
  X(ncclGetLastError, GetLastError)                 \
  X(ncclCommInitRankConfig, CommInitRankConfig)     \
  X(ncclCommFinalize, CommFinalize)                 \
  X(ncclCommDestroy, CommDestroy)                   \
  X(ncclCommAbort, CommAbort)                       \
  X(ncclCommGetAsyncError, CommGetAsyncError)       \
  X(ncclMemAlloc, MemAlloc)                         \
  X(ncclMemFree, MemFree)                           \
  X(ncclCommWindowRegister, CommWindowRegister)     \
  X(ncclCommWindowDeregister, CommWindowDeregister) \
  X(ncclAllGather, AllGather)                       \
  X(ncclReduceScatter, ReduceScatter)

struct NcclTable {
#define GRAPHSHARD_DECLARE(name, type) nccl::type name = nullptr;
  GRAPHSHARD_NCCL_ENTRY_POINTS(GRAPHSHARD_DECLARE)
#undef GRAPHSHARD_DECLARE
};

// A loaded NCCL. It stays loaded for good, since threads of its own may still run when a process ends.
class NcclLibrary : public std::enable_shared_from_this<NcclLibrary> {
 public:
  // NcclError if the file does not load or is no NCCL. One that is too old loads: `missing()` says what it lacks.
  static std::shared_ptr<NcclLibrary> load(const std::string& path, Driver& driver);

  Driver& driver() const { return driver_; }
  const NcclTable& table() const { return table_; }
  // Of the mapped file, which another library of the same SONAME may have put in place of the one asked for.
  const std::string& path() const { return path_; }
  int version() const { return version_; }  // X * 10000 + Y * 100 + Z
  const std::vector<std::string>& missing() const { return missing_; }
  ncclUniqueId unique_id() const;

  // NcclError naming what is missing, the version and the file, if `entry_point` is.
  void require(const char* entry_point) const;
  // Throws NcclError if `result` is not success; `where` says on what, and may be empty. To be called by the thread
  // that made the call: the library's last error may be a thread's own.
  void check(int result, const char* entry_point, const std::string& where) const {
    if (result != nccl::kSuccess) fail(result, entry_point, where);
  }
  // `comm`, if it is one that still is, may have a last error of its own.
  [[noreturn]] void fail(int result, const char* entry_point, const std::string& where,
                         ncclComm_t comm = nullptr) const;
  // "ncclInternalError (3), internal error - please report this issue; last error: ...".
  std::string describe(int result, ncclComm_t comm = nullptr) const;
  // "libnccl 2.28.9 (/usr/lib/libnccl.so.2)".
  std::string text() const;

 private:
  NcclLibrary(const std::string& path, Driver& driver);

  Driver& driver_;
  NcclTable table_;
  std::string path_;
  int version_ = 0;
  std::vector<std::string> missing_;
};

}  // namespace graphshard
