// Rows times packed matrices: y = x Wᵀ + b.
#pragma once

#include <cstdint>
#include <vector>

#include "team.h"

namespace segue {

enum class Kind : int32_t {
    F32 = 0, Q8_0 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 4, Q5_1 = 5, Q4_K = 6, Q5_K = 7, Q6_K = 8, BF16 = 9, F16 = 10
};

// A matrix [outputs, inputs] cut into panels of 16 outputs, the last one padded.
struct Matrix {
    Kind kind;
    int32_t outputs, inputs;
    const void* panels;
    const float* bias;  // [outputs], or null
};

// y[row] (= or +=) x[row] · Wᵀ + b.
struct Product {
    const Matrix* matrix;
    const float* x;
    int rows;
    float* y;
};

// All of them; strides in floats.
void gemm(Team& team, const std::vector<Product>& products, long x_stride, long y_stride, bool add);

// Products of the same rows, the outputs of `count` matrices side by side.
void gemm(
    Team& team, const Matrix* matrices, int count, const float* x, long x_stride, int rows, float* y, long y_stride,
    bool add);

// One row of a matrix as floats: the embedding of a token.
void unpack_row(const Matrix& matrix, int row, float* to);

}  // namespace segue
