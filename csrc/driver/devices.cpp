#include "driver/devices.h"

#include "driver/table.h"

namespace graphshard {

namespace {

std::string text_of(const CUuuid& uuid) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    const auto byte = static_cast<unsigned char>(uuid.bytes[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace

std::vector<std::string> device_uuids(const std::string& path) {
  const Table table = Table::load(path);
  const CUresult result = table.cuInit(0);
  if (result == CUDA_ERROR_NO_DEVICE) return {};
  table.check(result, "cuInit");
  int num_devices = 0;
  GRAPHSHARD_CALL(table, cuDeviceGetCount, &num_devices);
  std::vector<std::string> uuids;
  for (int index = 0; index < num_devices; ++index) {
    CUdevice device = 0;
    CUuuid uuid{};
    GRAPHSHARD_CALL(table, cuDeviceGet, &device, index);
    GRAPHSHARD_CALL(table, cuDeviceGetUuid, &uuid, device);
    uuids.push_back(text_of(uuid));
  }
  return uuids;
}

}  // namespace graphshard
