#include "gemm.h"

#include <algorithm>
#include <vector>

#include "panels.h"
#include "wide_panels.h"

namespace segue {
namespace {

// Rows of a tile: eight rows of x that lie a power of two apart fill the eight ways of a core's first cache.
constexpr int ROWS_OF_TILE = std::min(TILE_ROWS, 8);
constexpr int ROW_BLOCK = 15 * ROWS_OF_TILE;  // rows of x that stay in a core's cache while panels pass
constexpr int PANELS_OF_ONE_ROW = WIDTH / 2;  // that an item has
constexpr int WIDE_ROWS = 4;  // of x for which wide blocks are expanded in registers
constexpr int TILES_TO_EXPAND_FOR = 3;  // with two, expanding in registers twice costs less than writing and reading

template <class Panel>
Panel panel_of(const Matrix& matrix, long number, int ahead = 0) {
    const long size = Panel::bytes(matrix.inputs);
    Panel panel{(const uint8_t*)matrix.panels + number * size};
    if constexpr (requires { panel.ahead; }) panel.ahead = ahead * size;
    return panel;
}

// visit(weights) for each input of a panel, in order.
template <class Panel, class Visit>
void each_input(const Panel& panel, int inputs, const Visit& visit) {
    const int rows = Panel::rows(inputs);
    for (int number = 0; number * rows * Panel::HALVES < inputs; number++) {
        const auto block = panel.block(number);
        auto half = [&]<int HALF>() {
            for (int row = 0; row < rows; row++) visit(block.template row<HALF>(row));
        };
        half.template operator()<0>();
        if constexpr (Panel::HALVES == 2) half.template operator()<1>();
    }
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
template <class Panel, int ROWS = ROWS_OF_TILE>
void tiles(const Task& task, int first_row, int rows, int first_panel, int panels) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return tiles<Panel, ROWS - 1>(task, first_row, rows, first_panel, panels);
    constexpr int TOGETHER = panels_beside<Panel>(ROWS);
    int panel = 0;
    for (; panel + TOGETHER <= panels; panel += TOGETHER)
        tile<Panel, ROWS, TOGETHER>(task, first_row, first_panel + panel);
    for (; panel < panels; panel++) tile<Panel, ROWS, 1>(task, first_row, first_panel + panel);
}

int tile_count(int rows) { return (rows + ROWS_OF_TILE - 1) / ROWS_OF_TILE; }

template <class Panel>
void in_tiles(const Task& task, int first_row, int rows, int first_panel, int panels) {
    const int count = tile_count(rows);
    for (int tile = 0; tile < count; tile++) {
        const int start = rows * tile / count, end = rows * (tile + 1) / count;
        tiles<Panel>(task, first_row + start, end - start, first_panel, panels);
    }
}

// Blocks that many tiles need are expanded once, to the same floats. Floats of 16 bits are not: a shift costs less.
template <class Panel>
void in_tiles_of_floats(const Task& task, int first_row, int rows, int first_panel, int panels) {
    static thread_local std::vector<float> floats;
    Matrix matrix = task.matrix;
    floats.resize((size_t)panels * LANES * matrix.inputs);
    float* to = floats.data();
    for (int panel = 0; panel < panels; panel++)
        each_input(panel_of<Panel>(matrix, first_panel + panel, panels), matrix.inputs, [&](const Lanes& weights) {
            weights.store(to);
            to += LANES;
        });
    const int output = first_panel * LANES;
    matrix.panels = floats.data();
    matrix.outputs -= output;
    if (matrix.bias) matrix.bias += output;
    in_tiles<F32Panel>({matrix, task.x, task.x_stride, task.y + output, task.y_stride, task.add}, first_row, rows, 0, panels);
}

// For few rows only: each number of rows is code of its own, and blocks of so many kinds would be most of the library.
template <class Panel>
void wide_item(const Task& task, int first_row, int rows, int first_panel, int panels) {
    if (rows <= WIDE_ROWS)
        tiles<Panel, WIDE_ROWS>(task, first_row, rows, first_panel, panels);
    else
        in_tiles_of_floats<Panel>(task, first_row, rows, first_panel, panels);
}

template <class Panel>
void item(const Task& task, int first_row, int rows, int first_panel, int panels) {
    if (tile_count(rows) < TILES_TO_EXPAND_FOR)
        in_tiles<Panel>(task, first_row, rows, first_panel, panels);
    else
        in_tiles_of_floats<Panel>(task, first_row, rows, first_panel, panels);
}

void dispatch(const Task& task, int first_row, int rows, int first_panel, int panels) {
    switch (task.matrix.kind) {
        case Kind::F32: return in_tiles<F32Panel>(task, first_row, rows, first_panel, panels);
        case Kind::Q8_0: return item<BlockPanel<Q8_0>>(task, first_row, rows, first_panel, panels);
        case Kind::Q4_0: return item<BlockPanel<Q4_0>>(task, first_row, rows, first_panel, panels);
        case Kind::Q4_1: return item<BlockPanel<Q4_1>>(task, first_row, rows, first_panel, panels);
        case Kind::Q5_0: return wide_item<WidePanel<Q5_0>>(task, first_row, rows, first_panel, panels);
        case Kind::Q5_1: return wide_item<WidePanel<Q5_1>>(task, first_row, rows, first_panel, panels);
        case Kind::Q4_K: return wide_item<WidePanel<Q4_K>>(task, first_row, rows, first_panel, panels);
        case Kind::Q5_K: return wide_item<WidePanel<Q5_K>>(task, first_row, rows, first_panel, panels);
        case Kind::Q6_K: return wide_item<WidePanel<Q6_K>>(task, first_row, rows, first_panel, panels);
        case Kind::BF16: return in_tiles<FloatPanel<BFloat>>(task, first_row, rows, first_panel, panels);
        case Kind::F16: return in_tiles<FloatPanel<Half>>(task, first_row, rows, first_panel, panels);
    }
}

int panels_of(const Matrix& matrix) { return (matrix.outputs + LANES - 1) / LANES; }

// How many panels an item has: what some tiles of this many rows compute together, so that items are not too short.
int panels_of_item(int rows) {
    if (rows == 1) return PANELS_OF_ONE_ROW;
    const int block = std::min(rows, ROW_BLOCK), tiles = tile_count(block);
    return 2 * panels_beside<F32Panel>((block + tiles - 1) / tiles);
}

int groups_of(const Product& product) {
    const int together = panels_of_item(product.rows);
    return (panels_of(*product.matrix) + together - 1) / together;
}

template <class Panel>
void unpack_row_from(const Matrix& matrix, int row, float* to) {
    each_input(panel_of<Panel>(matrix, row / LANES), matrix.inputs, [&](const Lanes& weights) {
        float values[LANES];
        weights.store(values);
        *to++ = values[row % LANES];
    });
}

}  // namespace

void gemm(Team& team, const std::vector<Product>& products, long x_stride, long y_stride, bool add) {
    static thread_local std::vector<int> ends;  // of the items of each product; of the calling thread
    ends.clear();
    int items = 0;
    for (const Product& product : products) {
        const int row_blocks = (product.rows + ROW_BLOCK - 1) / ROW_BLOCK;
        if (row_blocks) items += row_blocks * groups_of(product);
        ends.push_back(items);
    }
    team.share(items, [&, ends = ends.data()](int item) {
        const long number = std::upper_bound(ends, ends + products.size(), item) - ends;
        const Product& product = products[number];
        if (number) item -= ends[number - 1];
        const int groups = groups_of(product), together = panels_of_item(product.rows);
        const int first_row = item / groups * ROW_BLOCK, first_panel = item % groups * together;
        const Task task{*product.matrix, product.x, x_stride, product.y, y_stride, add};
        dispatch(
            task, first_row, std::min(ROW_BLOCK, product.rows - first_row), first_panel,
            std::min(together, panels_of(*product.matrix) - first_panel));
    });
}

void gemm(
    Team& team, const Matrix* matrices, int count, const float* x, long x_stride, int rows, float* y, long y_stride,
    bool add) {
    static thread_local std::vector<Product> products;
    products.clear();
    for (const Matrix* matrix = matrices; matrix < matrices + count; y += matrix++->outputs)
        products.push_back({matrix, x, rows, y});
    gemm(team, products, x_stride, y_stride, add);
}

void unpack_row(const Matrix& matrix, int row, float* to) {
    switch (matrix.kind) {
        case Kind::F32: return unpack_row_from<F32Panel>(matrix, row, to);
        case Kind::Q8_0: return unpack_row_from<BlockPanel<Q8_0>>(matrix, row, to);
        case Kind::Q4_0: return unpack_row_from<BlockPanel<Q4_0>>(matrix, row, to);
        case Kind::Q4_1: return unpack_row_from<BlockPanel<Q4_1>>(matrix, row, to);
        case Kind::Q5_0: return unpack_row_from<WidePanel<Q5_0>>(matrix, row, to);
        case Kind::Q5_1: return unpack_row_from<WidePanel<Q5_1>>(matrix, row, to);
        case Kind::Q4_K: return unpack_row_from<WidePanel<Q4_K>>(matrix, row, to);
        case Kind::Q5_K: return unpack_row_from<WidePanel<Q5_K>>(matrix, row, to);
        case Kind::Q6_K: return unpack_row_from<WidePanel<Q6_K>>(matrix, row, to);
        case Kind::BF16: return unpack_row_from<FloatPanel<BFloat>>(matrix, row, to);
        case Kind::F16: return unpack_row_from<FloatPanel<Half>>(matrix, row, to);
    }
}

}  // namespace segue
