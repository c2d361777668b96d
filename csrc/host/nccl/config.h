// ncclConfig_t as callers of other versions pass it: what is beyond its size is undefined.
#pragma once

#include "communicator.h"

namespace graphshard::hostnccl {

/// `config` may be null: all defaults. kInvalidArgument names what is wrong with it.
Settings parse_config(const nccl::Config* config);

}  // namespace graphshard::hostnccl
