# What the host driver and its tests share: threads, cuda.h, build type, sanitizer.
find_package(Threads REQUIRED)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

if(NOT TARGET graphshard_warnings)
  add_library(graphshard_warnings INTERFACE)
  target_compile_options(graphshard_warnings INTERFACE -Wall -Wextra)
endif()

if(NOT TARGET graphshard_cuda_headers AND NOT CUDA_INCLUDE_DIR)
  if(NOT Python_EXECUTABLE)
    find_program(Python_EXECUTABLE NAMES python3 python REQUIRED)
  endif()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util; print(list(importlib.util.find_spec('nvidia.cuda_runtime').submodule_search_locations)[0] + '/include')"
    OUTPUT_VARIABLE CUDA_INCLUDE_DIR
    OUTPUT_STRIP_TRAILING_WHITESPACE
  )
  if(NOT EXISTS "${CUDA_INCLUDE_DIR}/cuda.h")
    message(FATAL_ERROR "cuda.h not found: install nvidia-cuda-runtime-cu12 or pass -DCUDA_INCLUDE_DIR=")
  endif()
  set(CUDA_INCLUDE_DIR "${CUDA_INCLUDE_DIR}" CACHE PATH "Folder of cuda.h")
endif()
if(NOT TARGET graphshard_cuda_headers)
  add_library(graphshard_cuda_headers INTERFACE)
  target_include_directories(graphshard_cuda_headers INTERFACE ${CUDA_INCLUDE_DIR})
endif()

# -DGRAPHSHARD_SANITIZE=thread (or address): the whole of what is built here.
if(GRAPHSHARD_SANITIZE)
  set(graphshard_sanitize -fsanitize=${GRAPHSHARD_SANITIZE} -fno-omit-frame-pointer)
endif()
