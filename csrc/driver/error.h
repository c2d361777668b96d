// The one exception of the C++ code: a driver call, or a check made in its place, that failed.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

namespace graphshard {

class DriverError : public std::runtime_error {
 public:
  DriverError(std::string entry_point, CUresult code, const std::string& message)
      : std::runtime_error(message), entry_point_(std::move(entry_point)), code_(code) {}

  const std::string& entry_point() const { return entry_point_; }
  CUresult code() const { return code_; }

 private:
  std::string entry_point_;
  CUresult code_;
};

}  // namespace graphshard
