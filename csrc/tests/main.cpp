// graphshard_litmus --list | LIBRARY [NAME ...] [--handoffs N]
//
// Runs ordering and error tests over any driver library, loaded by path. One line a test: ok, FAILED or skipped, with
// the reason. Exit codes: 0 all passed or skipped, 1 one failed, 2 bad request, 3 this machine has no such driver.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "litmus.h"

namespace graphshard::litmus {

namespace {

constexpr unsigned int kLimitS = 120;          // for one test
constexpr unsigned int kHandoffsPerS = 5'000;  // and more for many hand-offs: each may have to wait for a core
const char* library_path = nullptr;
const char* running = "";

void report_hang(int /*signal*/) {
  // Only what is safe in a signal handler.
  const char text[] = "FAILED: did not end within its limit: ";
  (void)!write(STDOUT_FILENO, text, sizeof(text) - 1);
  (void)!write(STDOUT_FILENO, running, std::strlen(running));
  (void)!write(STDOUT_FILENO, "\n", 1);
  _exit(1);
}

/// Whether it passed or was skipped.
bool run(const Litmus& litmus) {
  if (litmus.where == Where::kHostOnly && !cu.is_host()) {
    std::printf("skipped %s: only on the host driver\n", litmus.name);
    return true;
  }
  running = litmus.name;
  alarm(kLimitS + static_cast<unsigned int>(num_handoffs / kHandoffsPerS));
  try {
    litmus.run();
    std::printf("ok %s\n", litmus.name);
  } catch (const Skip& reason) {
    std::printf("skipped %s: %s\n", litmus.name, reason.what());
  } catch (const Failure& failure) {
    std::printf("FAILED %s: %s\n", litmus.name, failure.what());
    return false;
  }
  alarm(0);
  std::fflush(stdout);
  return true;
}

int run_all(const std::vector<std::string>& names) {
  int num_failed = 0;
  for (const std::string& name : names) {
    bool is_known = false;
    for (const Litmus& litmus : registry()) is_known = is_known || name == litmus.name;
    if (!is_known) {
      std::fprintf(stderr, "no litmus test is called %s; --list names them\n", name.c_str());
      return 2;
    }
  }
  for (const Litmus& litmus : registry()) {
    bool is_wanted = names.empty() && litmus.name[0] != '_';
    for (const std::string& name : names) is_wanted = is_wanted || name == litmus.name;
    if (is_wanted && !run(litmus)) ++num_failed;
  }
  return num_failed == 0 ? 0 : 1;
}

int list() {
  for (const Litmus& litmus : registry()) {
    if (litmus.name[0] != '_') std::printf("%s\n", litmus.name);
  }
  return 0;
}

}  // namespace

int run_in_fresh_process(const char* name, std::string* output, int fd) {
  int channel[2];
  TRUE(pipe(channel) == 0);
  const std::string handoffs = std::to_string(num_handoffs);
  const pid_t child = vfork();
  if (child == 0) {
    dup2(channel[1], STDOUT_FILENO);
    dup2(channel[1], STDERR_FILENO);
    close(channel[0]);
    if (fd >= 0) dup2(fd, kInheritedFd);
    execl("/proc/self/exe", "graphshard_litmus", library_path, name, "--handoffs", handoffs.c_str(), nullptr);
    _exit(127);
  }
  close(channel[1]);
  char buffer[4096];
  for (ssize_t got = 0; (got = read(channel[0], buffer, sizeof(buffer))) > 0;) {
    output->append(buffer, static_cast<size_t>(got));
  }
  close(channel[0]);
  int status = 0;
  TRUE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int run_main(int argc, char** argv) {
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--list") == 0) return list();
    if (std::strcmp(argv[i], "--handoffs") == 0 && i + 1 < argc) {
      num_handoffs = std::atol(argv[++i]);
    } else if (library_path == nullptr) {
      library_path = argv[i];
    } else {
      names.emplace_back(argv[i]);
    }
  }
  if (library_path == nullptr || num_handoffs <= 0) {
    std::fprintf(stderr, "usage: graphshard_litmus --list | LIBRARY [NAME ...] [--handoffs N]\n");
    return 2;
  }
  std::signal(SIGALRM, report_hang);
  const char* problem = load_driver(library_path);
  const bool opens_device = names.empty() || names[0] != "_before_init";
  if (problem == nullptr && opens_device) problem = open_device();
  if (problem != nullptr) {
    std::fprintf(stderr, "%s: %s\n", library_path, problem);
    return 3;
  }
  return run_all(names);
}

}  // namespace graphshard::litmus

int main(int argc, char** argv) { return graphshard::litmus::run_main(argc, argv); }
