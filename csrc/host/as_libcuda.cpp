// libcuda.so.1 in a folder of its own: a library of no code that needs the host driver, so that tools which ask the
// loader for `libcuda.so.1` (cuda-python) get the copy that this process has loaded. Never on a shared path: a process
// opts in with LD_LIBRARY_PATH (graphshard.device.as_libcuda), and only where no vendor driver is installed.
