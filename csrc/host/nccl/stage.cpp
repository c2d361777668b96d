#include "stage.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

namespace graphshard::hostnccl {

namespace {

struct Shared {
  std::mutex mutex;
  Stage stage;
  std::set<std::string> met;
};

Shared& shared() {
  static auto* const all = new Shared;
  return *all;
}

/// "name:rank=1,call=3"
bool parse_call(const std::string& item, const char* name, StagedCall* call) {
  const std::string format = std::string(name) + ":rank=%d,call=%llu%n";
  unsigned long long number = 0;
  int used = 0;
  if (std::sscanf(item.c_str(), format.c_str(), &call->rank, &number, &used) != 2) return false;
  call->call = number;
  return static_cast<size_t>(used) == item.size() && call->rank >= 0 && call->call > 0;
}

bool parse_item(const std::string& item, Stage* stage) {
  int used = 0;
  if (std::sscanf(item.c_str(), "version=%d%n", &stage->version, &used) == 1) {
    return static_cast<size_t>(used) == item.size() && stage->version > 0;
  }
  if (item.rfind("skip:", 0) == 0) return parse_call(item, "skip", &stage->skip);
  if (item.rfind("swap:", 0) == 0) return parse_call(item, "swap", &stage->swap);
  bool* const flag = item == "null_window"      ? &stage->null_window
                     : item == "first_use_hang" ? &stage->first_use_hang
                     : item == "sm_kernel"      ? &stage->sm_kernel
                     : item == "abort_hang"     ? &stage->abort_hang
                                                : nullptr;
  if (flag == nullptr) return false;
  *flag = true;
  return true;
}

}  // namespace

Stage stage() {
  const std::lock_guard lock(shared().mutex);
  return shared().stage;
}

bool set_stage(const char* spec) {
  if (spec == nullptr) return false;
  Stage fresh;
  std::istringstream items(spec);
  for (std::string item; std::getline(items, item, ';');) {
    const size_t begin = item.find_first_not_of(' ');
    if (begin == std::string::npos) continue;
    if (!parse_item(item.substr(begin, item.find_last_not_of(' ') - begin + 1), &fresh)) return false;
  }
  const std::lock_guard lock(shared().mutex);
  fresh.generation = shared().stage.generation + 1;
  shared().stage = fresh;
  shared().met.clear();
  return true;
}

void note_met(const char* name) {
  const std::lock_guard lock(shared().mutex);
  shared().met.emplace(name);
}

bool is_met(const char* name) {
  const std::lock_guard lock(shared().mutex);
  return shared().met.count(name) != 0;
}

}  // namespace graphshard::hostnccl
