# Finds the folder of cuda.h and cudaTypedefs.h and checks it: the target graphshard_cuda_headers.
#
# The order: GRAPHSHARD_CUDA_INCLUDE_DIR (a toolkit's include folder, or anybody's); the wheel nvidia-cuda-runtime-cu12,
# which the build requires; the wheel nvidia-cuda-runtime 13.x, which has another layout. No toolkit is searched for:
# find_package(CUDAToolkit) silently takes whatever is installed.
set(GRAPHSHARD_CUDA_INCLUDE_DIR "" CACHE PATH "Folder of cuda.h and cudaTypedefs.h; empty: a cuda-runtime wheel's")

set(graphshard_cuda_include_dir "${GRAPHSHARD_CUDA_INCLUDE_DIR}")
if(NOT graphshard_cuda_include_dir)
  if(NOT Python_EXECUTABLE)
    find_program(Python_EXECUTABLE NAMES python3 python REQUIRED)
  endif()
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_cuda_headers.py
    OUTPUT_VARIABLE graphshard_cuda_include_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
foreach(header cuda.h cudaTypedefs.h)
  if(NOT EXISTS "${graphshard_cuda_include_dir}/${header}")
    message(FATAL_ERROR "${header} was not found in '${graphshard_cuda_include_dir}': pip install one of "
                        "'nvidia-cuda-runtime-cu12==12.9.*' and 'nvidia-cuda-runtime>=13', "
                        "or set GRAPHSHARD_CUDA_INCLUDE_DIR to a toolkit's include folder")
  endif()
endforeach()

# Entry points are asked for by explicit version, so any header that declares those versions will do.
file(STRINGS "${graphshard_cuda_include_dir}/cuda.h" graphshard_cuda_version REGEX "^#define CUDA_VERSION [0-9]+")
string(REGEX REPLACE "[^0-9]" "" graphshard_cuda_version "${graphshard_cuda_version}")
if(NOT graphshard_cuda_version OR graphshard_cuda_version LESS 12090 OR graphshard_cuda_version GREATER_EQUAL 14000)
  message(FATAL_ERROR "cuda.h in '${graphshard_cuda_include_dir}' is of CUDA version '${graphshard_cuda_version}': "
                      "12090 (12.9) up to 13.x are supported")
endif()
message(STATUS "cuda.h ${graphshard_cuda_version}: ${graphshard_cuda_include_dir}")

add_library(graphshard_cuda_headers INTERFACE)
target_include_directories(graphshard_cuda_headers SYSTEM INTERFACE ${graphshard_cuda_include_dir})
