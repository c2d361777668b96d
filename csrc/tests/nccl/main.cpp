// graphshard_nccl_tests DRIVER NCCL [NAME ...]: tests of the host NCCL over the host driver beside it, ranks as
// threads.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <unistd.h>

#include "ranks.h"

namespace graphshard::litmus {

namespace {

constexpr unsigned int kLimitS = 240;  // for one test; ThreadSanitizer makes them slow
const char* running = "";

void report_hang(int /*signal*/) {
  const char text[] = "FAILED: did not end within its limit: ";
  (void)!write(STDOUT_FILENO, text, sizeof(text) - 1);
  (void)!write(STDOUT_FILENO, running, std::strlen(running));
  (void)!write(STDOUT_FILENO, "\n", 1);
  _exit(1);
}

bool run(const Litmus& test) {
  running = test.name;
  alarm(kLimitS);
  try {
    test.run();
  } catch (const Failure& failure) {
    std::printf("FAILED %s: %s\n", test.name, failure.what());
    return false;
  }
  alarm(0);
  std::printf("ok %s\n", test.name);
  std::fflush(stdout);
  return true;
}

int run_main(int argc, char** argv) {
  if (argc >= 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const Litmus& test : registry()) std::printf("%s\n", test.name);
    return 0;
  }
  if (argc < 3) {
    std::fprintf(stderr, "usage: graphshard_nccl_tests --list | DRIVER NCCL [NAME ...]\n");
    return 2;
  }
  std::signal(SIGALRM, report_hang);
  const char* problem = load_driver(argv[1]);
  if (problem == nullptr) problem = open_device();
  if (problem == nullptr) problem = load_nccl(argv[2]);
  if (problem != nullptr) {
    std::fprintf(stderr, "%s\n", problem);
    return 3;
  }
  const std::vector<std::string> names(argv + 3, argv + argc);
  int num_run = 0;
  int num_failed = 0;
  for (const Litmus& test : registry()) {
    bool is_wanted = names.empty();
    for (const std::string& name : names) is_wanted = is_wanted || name == test.name;
    if (!is_wanted) continue;
    ++num_run;
    if (!run(test)) ++num_failed;
  }
  std::fflush(stdout);
  if (num_run == 0) return 2;
  return num_failed == 0 ? 0 : 1;
}

}  // namespace

}  // namespace graphshard::litmus

int main(int argc, char** argv) { return graphshard::litmus::run_main(argc, argv); }
