// What a driver library shows this process, asked without making a context on any device.
#pragma once

#include <string>
#include <vector>

namespace graphshard {

// The UUID of every visible device (a MIG instance has its own), by index, as
// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`. DriverError if the library is no driver; no device at all is an empty
// list.
std::vector<std::string> device_uuids(const std::string& path);

}  // namespace graphshard
