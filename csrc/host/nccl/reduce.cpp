#include "reduce.h"

#include <cstring>

#include "nccl/abi.h"

namespace graphshard::hostnccl {

namespace {

uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Float32 {
  using Stored = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static float load(uint16_t bits) { return float_of(uint32_t{bits} << 16); }
  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);  // stays not-a-number
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Stored = uint16_t;
  static float load(uint16_t half) {
    const uint32_t sign = uint32_t{half & 0x8000U} << 16;
    const uint32_t exponent = (half >> 10) & 0x1FU;
    const uint32_t fraction = half & 0x3FFU;
    if (exponent == 0x1F) return float_of(sign | 0x7F800000U | (fraction << 13));
    if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
    const float subnormal = static_cast<float>(fraction) * 0x1p-24F;
    return sign == 0 ? subnormal : -subnormal;
  }
  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) return static_cast<uint16_t>(sign | 0x7E00U);
    if (magnitude >= 0x477FF000U) return static_cast<uint16_t>(sign | 0x7C00U);  // rounds to infinity
    if (magnitude < 0x38800000U) {                                               // subnormal: units of 2^-24
      // Adding 0.5 leaves 2^-24 as the last bit of the sum, rounded to nearest even.
      const uint32_t rounded = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
      return static_cast<uint16_t>(sign | rounded);
    }
    const uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
    return static_cast<uint16_t>(sign | ((rounded - (112U << 23)) >> 13));
  }
};

template <typename Type>
void sum(void* destination, const void* source, size_t num_elements, int num_ranks) {
  auto* to = static_cast<typename Type::Stored*>(destination);
  const auto* from = static_cast<const typename Type::Stored*>(source);
  for (size_t i = 0; i < num_elements; ++i) {
    float total = Type::load(from[i]);
    for (int rank = 1; rank < num_ranks; ++rank) {
      total += Type::load(from[static_cast<size_t>(rank) * num_elements + i]);
    }
    to[i] = Type::store(total);
  }
}

}  // namespace

size_t bytes_of_type(int data_type) {
  switch (data_type) {
    case nccl::kInt8:
    case nccl::kUint8:
      return 1;
    case nccl::kFloat16:
    case nccl::kBfloat16:
      return 2;
    case nccl::kInt32:
    case nccl::kFloat32:
      return 4;
    default:
      return 0;
  }
}

bool can_reduce(int data_type) {
  return data_type == nccl::kFloat32 || data_type == nccl::kFloat16 || data_type == nccl::kBfloat16;
}

void sum_ranks(void* destination, const void* source, size_t num_elements, int num_ranks, int data_type) {
  if (data_type == nccl::kFloat32) sum<Float32>(destination, source, num_elements, num_ranks);
  if (data_type == nccl::kFloat16) sum<Float16>(destination, source, num_elements, num_ranks);
  if (data_type == nccl::kBfloat16) sum<Bfloat16>(destination, source, num_elements, num_ranks);
}

}  // namespace graphshard::hostnccl
