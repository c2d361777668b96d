#include "config.h"

#include <algorithm>
#include <cstring>

namespace graphshard::hostnccl {

namespace {

constexpr unsigned int kOldestVersion = nccl::version_code(2, 14, 0);
constexpr size_t kMinBytes = offsetof(nccl::Config, blocking);
constexpr size_t kMaxBytes = 4096;  // no version comes near; more is no size

void require(bool condition, const std::string& text) {
  if (!condition) throw Failure(nccl::kInvalidArgument, text);
}

bool is_default(int value) { return value == nccl::kUndefinedInt; }

}  // namespace

Settings parse_config(const nccl::Config* config) {
  Settings settings;
  if (config == nullptr) return settings;
  require(config->size >= kMinBytes && config->size <= kMaxBytes,
          "ncclConfig_t says that it has " + std::to_string(config->size) + " bytes");
  require(config->magic == nccl::kConfigMagic,
          "ncclConfig_t was not made by NCCL_CONFIG_INITIALIZER: its magic is " + std::to_string(config->magic));
  const int loaded = stage().version;
  require(
      config->version >= kOldestVersion && config->version <= static_cast<unsigned int>(loaded),
      "ncclConfig_t is of version " + std::to_string(config->version) + ", the library of " + std::to_string(loaded));
  nccl::Config known;
  std::memcpy(static_cast<void*>(&known), config, std::min(config->size, sizeof(known)));
  require(is_default(known.blocking) || known.blocking == 1, "the host NCCL has blocking communicators only");
  const int policy = known.cta_policy;
  require(is_default(policy) || (policy >= 0 && policy <= nccl::kCtaPolicyZero),
          "CTAPolicy " + std::to_string(policy) + " is not 0, 1 or 2");
  settings.is_zero_cta = policy == nccl::kCtaPolicyZero;
  return settings;
}

}  // namespace graphshard::hostnccl
