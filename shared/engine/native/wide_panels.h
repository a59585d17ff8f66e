// Panels of the blocks that gguf/packing.py describes: values of more than four bits, and scales that have scales.
#pragma once

#include "panels.h"

namespace segue {

// fp16 numbers of a whole block, then for each 32 inputs: small scales, low bits, further bits.
template <int INPUTS_, int HALVES_, int SCALES_, int BITS_>
struct WideLayout {
    static constexpr int BITS = BITS_;
    static constexpr int SUBS = INPUTS_ / 32;
    static constexpr int HEADER_BYTES = 2 * HALVES_ * LANES;
    static constexpr int SCALE_BYTES = SCALES_ * LANES;
    static constexpr int SUB_BYTES = SCALE_BYTES + 16 * LANES + (BITS - 4) * 64;
    static constexpr int BYTES = HEADER_BYTES + SUBS * SUB_BYTES;
};

// Values of 32 inputs, 0 … 63: nibbles, then bytes that hold the further bits of some inputs each.
template <int BITS>
struct SplitValues {
    const uint8_t* low;

    template <int HALF>
    Lanes row(int number) const {
        const uint8_t* nibbles = low + number * LANES;
        if constexpr (BITS == 4) {
            return Lanes::from_nibbles<4 * HALF>(nibbles);
        } else {
            constexpr int FURTHER = BITS - 4, BYTES = 4 * FURTHER;
            const uint8_t* high = low + (16 + number % BYTES) * LANES;
            return Lanes::from_split<4 * HALF, BITS>(nibbles, high, number / BYTES * FURTHER);
        }
    }
};

// scale * q + offset, the same for all 32 inputs.
template <int BITS>
struct AffineBlock {
    Lanes scale, offset;
    SplitValues<BITS> values;
    template <int HALF>
    Lanes row(int number) const {
        return fma(scale, values.template row<HALF>(number), offset);
    }
};

struct Q5_0 : WideLayout<32, 1, 0, 5> {
    using Block = AffineBlock<BITS>;
    static Block open(const uint8_t* header, const uint8_t* sub) {
        const Lanes scale = Lanes::load((const Half*)header);
        return {scale, scale * Lanes::broadcast(-16.0f), {sub}};
    }
};

struct Q5_1 : WideLayout<32, 2, 0, 5> {
    using Block = AffineBlock<BITS>;
    static Block open(const uint8_t* header, const uint8_t* sub) {
        return {Lanes::load((const Half*)header), Lanes::load((const Half*)header + LANES), {sub}};
    }
};

// The products with small scales are exact: one fused step rounds as ggml's difference does.
template <int BITS_>
struct ScaledMinimum : WideLayout<256, 2, 2, BITS_> {
    using Layout = WideLayout<256, 2, 2, BITS_>;
    using Block = AffineBlock<BITS_>;
    static Block open(const uint8_t* header, const uint8_t* sub) {
        const Lanes zero = Lanes::broadcast(0.0f);
        const Lanes scale = Lanes::load((const Half*)header) * Lanes::from_signed_bytes(sub);
        const Lanes minimum = Lanes::load((const Half*)header + LANES) * Lanes::from_signed_bytes(sub + LANES);
        return {scale, zero - minimum, {sub + Layout::SCALE_BYTES}};
    }
};
struct Q4_K : ScaledMinimum<4> {};
struct Q5_K : ScaledMinimum<5> {};

// A scale for each 16 inputs.
struct Q6_K : WideLayout<256, 1, 2, 6> {
    struct Block {
        Lanes scales[2];
        SplitValues<BITS> values;
        template <int HALF>
        Lanes row(int number) const {
            const Lanes offset = scales[HALF] * Lanes::broadcast(-32.0f);
            return fma(scales[HALF], values.row<HALF>(number), offset);
        }
    };
    static Block open(const uint8_t* header, const uint8_t* sub) {
        const Lanes scale = Lanes::load((const Half*)header);
        return {
            {scale * Lanes::from_signed_bytes(sub), scale * Lanes::from_signed_bytes(sub + LANES)},
            {sub + SCALE_BYTES}};
    }
};

// See `BlockPanel`; `number` counts groups of 32 inputs.
template <class Format>
struct WidePanel {
    const uint8_t* blocks;
    long ahead = 0;

    using Block = typename Format::Block;
    static constexpr int HOLDS = 3;
    static constexpr int HALVES = 2;
    static int rows(int) { return 16; }
    static long bytes(int inputs) { return (long)(inputs / 32 / Format::SUBS) * Format::BYTES; }

    Block block(int number) const {
        const uint8_t* header = blocks + (long)(number / Format::SUBS) * Format::BYTES;
        const uint8_t* sub = header + Format::HEADER_BYTES + (number % Format::SUBS) * Format::SUB_BYTES;
        if (number % Format::SUBS == 0) prefetch<Format::HEADER_BYTES>(header + ahead);
        prefetch<Format::SUB_BYTES>(sub + ahead);
        return Format::open(header, sub);
    }
};

}  // namespace segue
