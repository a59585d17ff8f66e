// Sixteen outputs of a matrix side by side, in the types weights and KV pages come in, and the product with rows of x.
//
// A panel gives, input by input, the sixteen weights of its outputs as `Lanes`. `multiply` adds x times some panels to
// accumulators, input after input: each output of each row is one chain of sums in the order of the inputs, whatever
// rows and panels share the call. That is all the batch invariance there is, and it costs nothing.
//
//     panel = block block block …        inputs 0 … 31, 32 … 63, …
//     block = half half                  Q4: low halves of the bytes hold inputs 0 … 15, high halves 16 … 31
//     half  = row row row …              a row is one input: sixteen weights, one for each output
//
// A Q8 block has one half of 32 rows; a float panel is one block with one half of all inputs. A panel HOLDS as many `Lanes`
// in registers beside the sums: none where a sum takes its weight from memory, else the weights, and what expands them.
#pragma once

#include "lanes.h"

namespace segue {

// Bring what will be read soon into the core's second cache, `BYTES` from `from` on: the hardware alone does not keep ahead
// of several panels that are read at once. Weights of 8 bits and more are brought NEAR bytes before they are read: what lies
// farther away would leave the cache again. Blocks of fewer bits take longer to expand, and what is brought is the panel
// that is read after this one.
constexpr long NEAR = 1024;
template <int BYTES>
inline void prefetch(const void* from) {
    SEGUE_UNROLL for (int at = 0; at < BYTES; at += 64) __builtin_prefetch((const uint8_t*)from + at, 0, 2);
}

// Keys or values of a KV page: rows of values `stride` apart. `ahead` is the distance in values to what is read soon.
template <class Value>
struct CellPanel {
    const Value* values;
    long stride, ahead;

    static constexpr int HOLDS = sizeof(Value) < sizeof(float);
    static constexpr int HALVES = 1;
    static int rows(int inputs) { return inputs; }  // of a half

    struct Block {
        const Value* values;
        long stride, ahead;
        template <int HALF>
        Lanes row(int number) const {
            const Value* start = values + number * stride;
            __builtin_prefetch(start + ahead);
            return Lanes::load(start);
        }
    };
    Block block(int) const { return {values, stride, ahead}; }
};

// Float weights, sixteen for each input.
template <class Value>
struct FloatPanel {
    const uint8_t* values;

    static constexpr int HOLDS = sizeof(Value) < sizeof(float);
    static constexpr int HALVES = 1;
    static int rows(int inputs) { return inputs; }
    static long bytes(int inputs) { return inputs * LANES * (long)sizeof(Value); }

    struct Block {
        const uint8_t* values;
        template <int HALF>
        Lanes row(int number) const {
            const uint8_t* start = values + number * LANES * (long)sizeof(Value);
            prefetch<LANES * sizeof(Value)>(start + NEAR);
            return Lanes::load((const Value*)start);
        }
    };
    Block block(int) const { return {values}; }
};
using F32Panel = FloatPanel<float>;

// ggml's blocks of 32 inputs, sixteen of them side by side: scales, then bytes. `Format` opens one and expands its rows.
// `ahead` is the distance in bytes to the panel that is read after this one.
template <class Format>
struct BlockPanel {
    const uint8_t* blocks;
    long ahead = 0;

    using Block = typename Format::Block;
    static constexpr int HOLDS = Format::BITS == 8 ? 2 : 3;  // without an offset, and with one
    static constexpr int HALVES = Format::HALVES;
    static int rows(int) { return 32 / HALVES; }
    static long bytes(int inputs) { return inputs / 32 * Format::BYTES; }

    Block block(int number) const {
        const uint8_t* start = blocks + (long)number * Format::BYTES;
        prefetch<Format::BYTES>(start + (Format::BITS == 8 ? NEAR : ahead));
        return Format::open(start);
    }
};

struct Q8_0 {
    static constexpr int BITS = 8;
    static constexpr int HALVES = 1;
    static constexpr int BYTES = 2 * LANES + 32 * LANES;

    struct Block {
        Lanes scale;
        const uint8_t* bytes;
        template <int HALF>
        Lanes row(int number) const {
            return scale * Lanes::from_signed_bytes(bytes + number * LANES);
        }
    };
    static Block open(const uint8_t* start) { return {Lanes::load((const Half*)start), start + 2 * LANES}; }
};

// A byte holds input j of the block in its low half, input j + 16 in its high half.
struct Q4 {
    static constexpr int BITS = 4;
    static constexpr int HALVES = 2;

    struct Block {
        Lanes scale, offset;
        const uint8_t* bytes;
        template <int HALF>
        Lanes row(int number) const {
            return fma(scale, Lanes::from_nibbles<4 * HALF>(bytes + number * LANES), offset);
        }
    };
};

struct Q4_1 : Q4 {
    static constexpr int BYTES = 4 * LANES + 16 * LANES;

    static Block open(const uint8_t* start) {
        return {Lanes::load((const Half*)start), Lanes::load((const Half*)start + LANES), start + 4 * LANES};
    }
};

// scale * (q - 8): the product with 8 is exact, so one fused step rounds as ggml's two do.
struct Q4_0 : Q4 {
    static constexpr int BYTES = 2 * LANES + 16 * LANES;

    static Block open(const uint8_t* start) {
        const Lanes scale = Lanes::load((const Half*)start);
        return {scale, scale * Lanes::broadcast(-8.0f), start + 2 * LANES};
    }
};

// How many panels go with this many rows: enough independent sums to hide latency, no more than there are registers, which
// AVX2 has for eight `Lanes`.
template <class Panel>
constexpr int panels_beside(int rows) {
    if (WIDTH == 16) return rows == 1 ? 8 : rows <= 6 ? 4 : rows <= 9 ? 3 : 2;
    if (WIDTH == 8) return 2 * rows + Panel::HOLDS <= 6 ? 2 : 1;
    return 1;
}

// sums[row][panel] += x[row, 0 … inputs) · panel. Never a call: the sums would lie in memory.
template <class Panel, int ROWS, int PANELS>
[[gnu::always_inline]] inline void multiply(
    const float* x, long x_stride, const Panel (&panels)[PANELS], int inputs, Lanes (&sums)[ROWS][PANELS]) {
    const int rows = Panel::rows(inputs);
    const int blocks = inputs / (rows * Panel::HALVES);
    for (int number = 0; number < blocks; number++) {
        typename Panel::Block block[PANELS];
        SEGUE_UNROLL for (int panel = 0; panel < PANELS; panel++) block[panel] = panels[panel].block(number);
        auto half = [&]<int HALF>() __attribute__((always_inline)) {
            for (int row = 0; row < rows; row++, x++) {
                Lanes weights[PANELS];
                SEGUE_UNROLL for (int panel = 0; panel < PANELS; panel++) weights[panel] =
                    block[panel].template row<HALF>(row);
                SEGUE_UNROLL for (int r = 0; r < ROWS; r++) {
                    const Lanes value = Lanes::broadcast(x[r * x_stride]);
                    SEGUE_UNROLL for (int panel = 0; panel < PANELS; panel++) sums[r][panel] =
                        fma(value, weights[panel], sums[r][panel]);
                }
            }
        };
        half.template operator()<0>();
        if constexpr (Panel::HALVES == 2) half.template operator()<1>();
    }
}

}  // namespace segue
