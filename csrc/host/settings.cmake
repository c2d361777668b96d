# What the host driver and its tests share: threads, cuda.h, build type, sanitizer.
find_package(Threads REQUIRED)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

if(NOT TARGET graphshard_warnings)
  add_library(graphshard_warnings INTERFACE)
  target_compile_options(graphshard_warnings INTERFACE -Wall -Wextra)
endif()

if(NOT TARGET graphshard_cuda_headers)
  include(${CMAKE_CURRENT_LIST_DIR}/../../cmake/cuda_headers.cmake)
endif()

# -DGRAPHSHARD_SANITIZE=thread (or address): the whole of what is built here.
if(GRAPHSHARD_SANITIZE)
  set(graphshard_sanitize -fsanitize=${GRAPHSHARD_SANITIZE} -fno-omit-frame-pointer)
endif()
