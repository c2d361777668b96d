#include "nccl/table.h"

#include <dlfcn.h>

#include <algorithm>

namespace graphshard {

namespace {

constexpr int kTimeout = 8;  // from 2.32 on

const char* result_name(int result) {
  switch (result) {
    case nccl::kSuccess:
      return "ncclSuccess";
    case nccl::kUnhandledCudaError:
      return "ncclUnhandledCudaError";
    case nccl::kSystemError:
      return "ncclSystemError";
    case nccl::kInternalError:
      return "ncclInternalError";
    case nccl::kInvalidArgument:
      return "ncclInvalidArgument";
    case nccl::kInvalidUsage:
      return "ncclInvalidUsage";
    case nccl::kRemoteError:
      return "ncclRemoteError";
    case nccl::kInProgress:
      return "ncclInProgress";
    case kTimeout:
      return "ncclTimeout";
    default:
      return "unknown result";
  }
}

// 2.9 changed the code from X * 1000 + Y * 100 + Z.
std::string version_text(int version) {
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  const int rest = version >= 10000 ? version % 10000 : version % 1000;
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." + std::to_string(rest % 100);
}

std::string mapped_path(void* function, const std::string& path) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : path;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::shared_ptr<NcclLibrary> NcclLibrary::load(const std::string& path, Driver& driver) {
  driver.enter();
  return std::shared_ptr<NcclLibrary>(new NcclLibrary(path, driver));
}

NcclLibrary::NcclLibrary(const std::string& path, Driver& driver) : driver_(driver), path_(path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw NcclError("dlopen", nccl::kSystemError, "NCCL library " + path + " could not be loaded: " + dlerror());
  }
#define GRAPHSHARD_RESOLVE(name, type)                               \
  table_.name = reinterpret_cast<nccl::type>(dlsym(library, #name)); \
  if (table_.name == nullptr) missing_.emplace_back(#name);
  GRAPHSHARD_NCCL_ENTRY_POINTS(GRAPHSHARD_RESOLVE)
#undef GRAPHSHARD_RESOLVE
  if (table_.ncclGetVersion == nullptr) {
    dlclose(library);
    throw NcclError("ncclGetVersion", nccl::kInvalidUsage,
                    path + " has no ncclGetVersion: it is no NCCL; give the path of a libnccl.so.2");
  }
  path_ = mapped_path(reinterpret_cast<void*>(table_.ncclGetVersion), path);
  check(table_.ncclGetVersion(&version_), "ncclGetVersion", path_);
}

ncclUniqueId NcclLibrary::unique_id() const {
  driver_.enter();
  require("ncclGetUniqueId");
  ncclUniqueId id{};
  check(table_.ncclGetUniqueId(&id), "ncclGetUniqueId", "");
  return id;
}

void NcclLibrary::require(const char* entry_point) const {
  if (std::find(missing_.begin(), missing_.end(), entry_point) == missing_.end()) return;
  throw NcclError(entry_point, nccl::kInvalidUsage,
                  text() + " is loaded, which lacks " + joined(missing_) +
                      ": symmetric windows need 2.28.3 or newer; install it, or use transport pull");
}

std::string NcclLibrary::text() const { return "libnccl " + version_text(version_) + " (" + path_ + ")"; }

std::string NcclLibrary::describe(int result, ncclComm_t comm) const {
  std::string text = std::string(result_name(result)) + " (" + std::to_string(result) + ")";
  if (table_.ncclGetErrorString != nullptr) {
    if (const char* meaning = table_.ncclGetErrorString(result)) text += ", " + std::string(meaning);
  }
  const char* last = table_.ncclGetLastError != nullptr ? table_.ncclGetLastError(comm) : nullptr;
  if (last != nullptr && *last != '\0') text += "; last error: " + std::string(last);
  return text;
}

void NcclLibrary::fail(int result, const char* entry_point, const std::string& where, ncclComm_t comm) const {
  throw NcclError(entry_point, result,
                  std::string(entry_point) + " failed: " + describe(result, comm) +
                      (where.empty() ? "" : ", at " + where) + ", " + text());
}

}  // namespace graphshard
