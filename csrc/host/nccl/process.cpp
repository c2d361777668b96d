#include "process.h"

#include <cstdio>
#include <cstring>
#include <string>

#include <unistd.h>

namespace graphshard::hostnccl {

namespace {

/// State letter and start time, fields 3 and 22; false if there is no such process.
bool read_stat(int64_t pid, char* state, uint64_t* start_time) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return false;
  char text[1024];
  const size_t got = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[got] = '\0';
  const char* after_name = std::strrchr(text, ')');  // a name may hold anything, blanks and brackets too
  if (after_name == nullptr) return false;
  unsigned long long start = 0;
  const int fields =
      std::sscanf(after_name + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                  state, &start);
  *start_time = start;
  return fields == 2;
}

}  // namespace

ProcessId ProcessId::self() {
  ProcessId self;
  self.pid = getpid();
  char state = 0;
  read_stat(self.pid, &state, &self.start_time);
  return self;
}

bool ProcessId::is_alive() const {
  if (pid == getpid()) return true;
  char state = 0;
  uint64_t started = 0;
  if (!read_stat(pid, &state, &started)) return false;
  return started == start_time && state != 'Z' && state != 'X';
}

}  // namespace graphshard::hostnccl
