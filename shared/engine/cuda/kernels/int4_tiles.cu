// Weights in bfloat16 from the tiles of 4-bit numbers that torch's `_weight_int4pack_mm` reads (../quantized/int4.py),
// with the roundings of that kernel. It costs what it takes to read half a byte a number and to write two.

#include "numbers16.cuh"

#define MADE 8  // inputs of an output that a thread makes: a quarter of 32, which four lanes hold in a word each

// tiles [outputs / 8, inputs / (32 words), 32, words]; scales_and_zeros [inputs / group, outputs, 2]; weight [outputs,
// inputs]. Neighbours write neighbours.
extern "C" __global__ void dequantize_int4(const unsigned* tiles, const BFloat16* scales_and_zeros, BFloat16* weight,
                                           int outputs, int inputs, int words, int group) {
  const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const int output = (int)(thread / (inputs / MADE)), input = (int)(thread % (inputs / MADE)) * MADE;
  if (output >= outputs) return;
  const int span = input / (32 * words), word = input / 32 % words, pair = input / MADE % 4;
  const i64 tile = (i64)(output / 8) * (inputs / (32 * words)) + span;
  const unsigned* lane = tiles + (tile * 32 + output % 8 * 4) * words + word;
  const BFloat16* of_group = scales_and_zeros + ((i64)(input / group) * outputs + output) * 2;
  const float scale = wide(of_group[0]), zero = wide(of_group[1]);
  Neighbours<BFloat16, MADE> made;
  for (int i = 0; i < MADE / 2; ++i) {
    const unsigned numbers = lane[i * words] >> 4 * pair;
    narrow((float)((int)(numbers & 15) - 8) * scale + zero, made.of[2 * i]);
    narrow((float)((int)(numbers >> 16 & 15) - 8) * scale + zero, made.of[2 * i + 1]);
  }
  *reinterpret_cast<Neighbours<BFloat16, MADE>*>(weight + thread * MADE) = made;
}
