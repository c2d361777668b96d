// How a call fails inside the library: a result code and a text. The entry points turn it into NCCL's two halves.
#pragma once

#include <stdexcept>
#include <string>

#include "nccl/abi.h"

namespace graphshard::hostnccl {

using nccl::Result;

class Failure : public std::runtime_error {
 public:
  Failure(Result code, const std::string& text) : std::runtime_error(text), code_(code) {}
  Result code() const { return code_; }

 private:
  Result code_;
};

}  // namespace graphshard::hostnccl
