// What a server's C++ does with a step that Python captured (serve_handle.py): no Python runs between its replays.
//
// <package> is the folder of graphshard's extension: python -c "import graphshard._core as c; print(c.__file__)"
//
//   c++ -shared -fPIC serve_handle.cpp -o serve.so -I<package>/include -L<package>/lib -lgraphshard -Wl,-R<package>/lib
#include <graphshard.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

// The host driver's addresses are host memory. On a GPU these are copies on the step's stream.
template <typename T>
T* at(const gs_tensor& tensor) {
  return reinterpret_cast<T*>(tensor.address);
}

gs_status decode(gs_step* step, int64_t* tokens, int64_t num_tokens) {
  gs_step_info info = GS_STEP_INFO_INIT;
  gs_tensor token = {}, position = {}, logits = {};
  gs_status status = gs_step_get_info(step, &info);
  if (status == GS_OK) status = gs_step_input(step, "tokens", &token);
  if (status == GS_OK) status = gs_step_input(step, "positions", &position);
  if (status == GS_OK) status = gs_step_output(step, "logits", &logits);
  for (int64_t i = 0; status == GS_OK && i + 1 < num_tokens; ++i) {
    *at<int64_t>(token) = tokens[i];
    *at<int64_t>(position) = i;
    status = gs_step_replay(step, info.stream);
    if (status == GS_OK) status = gs_step_wait(step, 30.0);  // seconds; GS_TIMEOUT, never a hang
    if (status != GS_OK) break;
    const float* begin = at<float>(logits);
    tokens[i + 1] = std::max_element(begin, begin + logits.num_bytes / sizeof(float)) - begin;
  }
  return status;
}

// tokens[0] is given, the others are decoded.
extern "C" int serve(uint64_t handle, int64_t* tokens, int64_t num_tokens) {
  gs_step* step = nullptr;
  gs_status status = gs_step_open(handle, &step);  // a reference of our own: Python may drop its objects now
  if (status == GS_OK) status = decode(step, tokens, num_tokens);
  if (status != GS_OK) std::fprintf(stderr, "serve: %s\n", gs_last_error());
  gs_step_release(step);
  return status;
}
