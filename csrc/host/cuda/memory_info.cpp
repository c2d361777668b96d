// How much memory there is: /proc/meminfo and the control group, whichever is less.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

#include "memory.h"

namespace graphshard::hostcuda {

namespace {

/// The value after `key` in a file of "key value" lines; `missing` if it is not there or not a number.
size_t read_field(const char* path, const std::string& key, size_t missing) {
  std::ifstream file(path);
  std::string name;
  size_t value = 0;
  while (file >> name) {
    if (name == key) return file >> value ? value : missing;
    file.ignore(4096, '\n');
  }
  return missing;
}

size_t read_number(const char* path, size_t missing) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : missing;  // "max" is not a number: no limit
}

size_t group_limit_bytes() { return read_number("/sys/fs/cgroup/memory.max", SIZE_MAX); }

size_t group_available_bytes() {
  const size_t limit = group_limit_bytes();
  if (limit == SIZE_MAX) return SIZE_MAX;
  const size_t used = read_number("/sys/fs/cgroup/memory.current", 0);
  const size_t reclaimable = read_field("/sys/fs/cgroup/memory.stat", "inactive_file", 0);
  return limit > used ? limit - used + std::min(reclaimable, used) : std::min(reclaimable, used);
}

}  // namespace

size_t available_bytes() {
  const size_t machine = read_field("/proc/meminfo", "MemAvailable:", SIZE_MAX / 1024) * 1024;
  return std::min(machine, group_available_bytes());
}

size_t total_bytes() {
  const size_t machine = read_field("/proc/meminfo", "MemTotal:", SIZE_MAX / 1024) * 1024;
  return std::min(machine, group_limit_bytes());
}

}  // namespace graphshard::hostcuda
