#include "gemm.h"

#include <algorithm>

#include "panels.h"

namespace segue {
namespace {

constexpr int ROW_BLOCK = 10 * TILE_ROWS;  // rows of x that stay in a core's cache while panels pass

template <class Panel>
Panel panel_of(const Matrix& matrix, long number, int ahead = 0) {
    const long size = Panel::bytes(matrix.inputs);
    return {(const uint8_t*)matrix.panels + number * size, ahead * size};
}

struct Task {
    const Matrix& matrix;
    const float* x;
    long x_stride;
    float* y;  // the matrix's first output of the first row
    long y_stride;
    bool add;
};

template <class Panel, int ROWS, int PANELS>
void tile(const Task& task, int first_row, int first_panel) {
    const Matrix& matrix = task.matrix;
    Panel panels[PANELS];
    for (int panel = 0; panel < PANELS; panel++) panels[panel] = panel_of<Panel>(matrix, first_panel + panel, PANELS);
    Lanes sums[ROWS][PANELS];
    SEGUE_UNROLL for (auto& row : sums) SEGUE_UNROLL for (auto& sum : row) sum = Lanes::broadcast(0.0f);
    multiply<Panel, ROWS, PANELS>(task.x + first_row * task.x_stride, task.x_stride, panels, matrix.inputs, sums);
    SEGUE_UNROLL for (int row = 0; row < ROWS; row++) SEGUE_UNROLL for (int panel = 0; panel < PANELS; panel++) {
        const int output = (first_panel + panel) * LANES;
        const int count = std::min(LANES, matrix.outputs - output);
        float* to = task.y + (first_row + row) * task.y_stride + output;
        Lanes sum = sums[row][panel];
        if (matrix.bias) sum = sum + Lanes::load(matrix.bias + output, count);
        if (task.add) sum = Lanes::load(to, count) + sum;
        sum.store(to, count);
    }
}

// Rows [first, first + rows) of one panel, or of several together.
template <class Panel, int ROWS = TILE_ROWS>
void tiles(const Task& task, int first_row, int rows, int first_panel, int panels) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return tiles<Panel, ROWS - 1>(task, first_row, rows, first_panel, panels);
    constexpr int TOGETHER = panels_beside(ROWS);
    int panel = 0;
    for (; panel + TOGETHER <= panels; panel += TOGETHER)
        tile<Panel, ROWS, TOGETHER>(task, first_row, first_panel + panel);
    for (; panel < panels; panel++) tile<Panel, ROWS, 1>(task, first_row, first_panel + panel);
}

template <class Panel>
void item(const Task& task, int first_row, int rows, int first_panel, int panels) {
    const int tile_count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int tile = 0; tile < tile_count; tile++) {
        const int start = rows * tile / tile_count, end = rows * (tile + 1) / tile_count;
        tiles<Panel>(task, first_row + start, end - start, first_panel, panels);
    }
}

void dispatch(const Task& task, int first_row, int rows, int first_panel, int panels) {
    switch (task.matrix.kind) {
        case Kind::F32: return item<F32Panel>(task, first_row, rows, first_panel, panels);
        case Kind::Q8_0: return item<BlockPanel<Q8_0>>(task, first_row, rows, first_panel, panels);
        case Kind::Q4_0: return item<BlockPanel<Q4_0>>(task, first_row, rows, first_panel, panels);
        case Kind::Q4_1: return item<BlockPanel<Q4_1>>(task, first_row, rows, first_panel, panels);
    }
}

int panels_of(const Matrix& matrix) { return (matrix.outputs + LANES - 1) / LANES; }

template <class Panel>
void unpack_row_from(const Matrix& matrix, int row, float* to) {
    const Panel panel = panel_of<Panel>(matrix, row / LANES);
    const int rows = Panel::rows(matrix.inputs);
    for (int number = 0; number * rows * Panel::HALVES < matrix.inputs; number++) {
        const auto block = panel.block(number);
        auto half = [&]<int HALF>() {
            for (int input = 0; input < rows; input++) {
                float weights[LANES];
                block.template row<HALF>(input).store(weights);
                *to++ = weights[row % LANES];
            }
        };
        half.template operator()<0>();
        if constexpr (Panel::HALVES == 2) half.template operator()<1>();
    }
}

}  // namespace

void gemm(
    Team& team, const Matrix* matrices, int count, const float* x, long x_stride, int rows, float* y, long y_stride,
    bool add) {
    const int together = rows == 1 ? panels_beside(1) : 4;  // panels of an item
    const int row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int groups = 0;  // of panels, over all matrices
    for (int number = 0; number < count; number++) groups += (panels_of(matrices[number]) + together - 1) / together;
    team.share(row_blocks * groups, [&](int number) {
        const int first_row = number / groups * ROW_BLOCK;
        int group = number % groups;
        float* to = y;
        const Matrix* matrix = matrices;
        for (;; matrix++) {
            const int here = (panels_of(*matrix) + together - 1) / together;
            if (group < here) break;
            group -= here;
            to += matrix->outputs;
        }
        const Task task{*matrix, x, x_stride, to, y_stride, add};
        const int first_panel = group * together;
        dispatch(
            task, first_row, std::min(ROW_BLOCK, rows - first_row), first_panel,
            std::min(together, panels_of(*matrix) - first_panel));
    });
}

void unpack_row(const Matrix& matrix, int row, float* to) {
    switch (matrix.kind) {
        case Kind::F32: return unpack_row_from<F32Panel>(matrix, row, to);
        case Kind::Q8_0: return unpack_row_from<BlockPanel<Q8_0>>(matrix, row, to);
        case Kind::Q4_0: return unpack_row_from<BlockPanel<Q4_0>>(matrix, row, to);
        case Kind::Q4_1: return unpack_row_from<BlockPanel<Q4_1>>(matrix, row, to);
    }
}

}  // namespace segue
