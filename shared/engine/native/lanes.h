// Sixteen floats that are computed together, on AVX-512, AVX2 or anything else a compiler knows.
//
// All kernels are written in terms of `Lanes`, so each number is made by the same operations in the same order whatever
// the instruction set: one register of 16 on AVX-512, two of 8 on AVX2, four of 4 elsewhere. Products are fused into
// sums (`fma`) where the machine can; a build without that rounds differently, and says so in its fingerprint.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define SEGUE_UNROLL _Pragma("GCC unroll 16")  // without it gcc keeps arrays of registers in memory

namespace segue {

using Half = _Float16;

struct BFloat {  // the upper half of a float: its exponent, and eight bits of its fraction
    uint16_t bits;
};

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int WIDTH = 16;      // floats in a register
constexpr int TILE_ROWS = 12;  // rows of a tile of `multiply`: as many accumulators as registers allow
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8;
constexpr int TILE_ROWS = 6;
#else
constexpr int WIDTH = 4;
constexpr int TILE_ROWS = 3;
#endif

constexpr int PARTS = LANES / WIDTH;

typedef float Register __attribute__((vector_size(WIDTH * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4), may_alias));
typedef int32_t IntRegister __attribute__((vector_size(WIDTH * sizeof(int32_t))));

struct Lanes {
    Register part[PARTS];

    Lanes() = default;
    Lanes(const Lanes&) = default;
    template <class... Parts>
        requires(sizeof...(Parts) == PARTS && (std::is_same_v<Parts, Register> && ...))
    Lanes(Parts... parts) : part{parts...} {}

    // In registers: gcc copies an array of them through memory, in pieces that later loads wait for.
    Lanes& operator=(const Lanes& other) {
        SEGUE_UNROLL for (int number = 0; number < PARTS; number++) part[number] = other.part[number];
        return *this;
    }

    static Lanes broadcast(float value) {
        Lanes lanes;
        SEGUE_UNROLL for (auto& part : lanes.part) part = value - Register{};
        return lanes;
    }

    static Lanes load(const float* from) {
        Lanes lanes;
        SEGUE_UNROLL for (int part = 0; part < PARTS; part++) lanes.part[part] = *(const Unaligned*)(from + part * WIDTH);
        return lanes;
    }

    static Lanes load(const Half* from) {
#if defined(__AVX512F__)
        return {(Register)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from))};
#elif defined(__AVX2__) && defined(__FMA__)
        const auto* halves = (const __m128i*)from;
        return {(Register)_mm256_cvtph_ps(_mm_loadu_si128(halves)),
                 (Register)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
        float wide[LANES];
        for (int lane = 0; lane < LANES; lane++) wide[lane] = from[lane];
        return load(wide);
#endif
    }

    static Lanes load(const BFloat* from) {
#if defined(__AVX512F__)
        return {(Register)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16)};
#elif defined(__AVX2__) && defined(__FMA__)
        const auto* halves = (const __m128i*)from;
        return {(Register)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16),
                 (Register)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)), 16)};
#else
        float wide[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t bits = (uint32_t)from[lane].bits << 16;
            std::memcpy(wide + lane, &bits, sizeof(bits));
        }
        return load(wide);
#endif
    }

    // The first `count` values, and zeros.
    static Lanes load(const float* from, int count) {
        if (count == LANES) return load(from);
        float padded[LANES] = {};
        std::memcpy(padded, from, count * sizeof(float));
        return load(padded);
    }

    static Lanes from_signed_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
        return {(Register)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)))};
#elif defined(__AVX2__) && defined(__FMA__)
        return {(Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from))),
                 (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8))))};
#else
        float wide[LANES];
        for (int lane = 0; lane < LANES; lane++) wide[lane] = (int8_t)from[lane];
        return load(wide);
#endif
    }

    // Bits `SHIFT` to `SHIFT + 3` of each of sixteen bytes.
    template <int SHIFT>
    static Lanes from_nibbles(const uint8_t* from) {
#if defined(__AVX512F__)
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
        bytes = SHIFT ? _mm512_srli_epi32(bytes, SHIFT) : _mm512_and_si512(bytes, _mm512_set1_epi32(15));
        return {(Register)_mm512_cvtepi32_ps(bytes)};
#elif defined(__AVX2__) && defined(__FMA__)
        Lanes lanes;
        SEGUE_UNROLL for (int half = 0; half < 2; half++) {
            __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * half)));
            bytes = SHIFT ? _mm256_srli_epi32(bytes, SHIFT) : _mm256_and_si256(bytes, _mm256_set1_epi32(15));
            lanes.part[half] = (Register)_mm256_cvtepi32_ps(bytes);
        }
        return lanes;
#else
        float wide[LANES];
        for (int lane = 0; lane < LANES; lane++) wide[lane] = (from[lane] >> SHIFT) & 15;
        return load(wide);
#endif
    }

    // Numbers of `BITS` bits, more than four: four are those of `from_nibbles`, the others lie in a byte of `high` each, from
    // bit 4 + `place` on where SHIFT is 0, else from bit `place` on.
    template <int SHIFT, int BITS>
    static Lanes from_split(const uint8_t* low, const uint8_t* high, int place) {
        constexpr int HIGH_BITS = ((1 << BITS) - 1) & ~15;
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
        __m128i nibbles = _mm_loadu_si128((const __m128i*)low);
        nibbles = _mm_and_si128(SHIFT ? _mm_srli_epi16(nibbles, SHIFT) : nibbles, _mm_set1_epi8(15));
        const __m128i fields = _mm_loadu_si128((const __m128i*)high);
        __m128i bytes = SHIFT ? _mm_sll_epi16(fields, _mm_cvtsi32_si128(4 - place)) : _mm_srl_epi16(fields, _mm_cvtsi32_si128(place));
        bytes = _mm_or_si128(nibbles, _mm_and_si128(bytes, _mm_set1_epi8(HIGH_BITS)));
#if defined(__AVX512F__)
        return {(Register)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
#else
        return {(Register)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                 (Register)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
#endif
#else
        float wide[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int field = SHIFT ? high[lane] << (4 - place) : high[lane] >> place;
            wide[lane] = ((low[lane] >> SHIFT) & 15) | (field & HIGH_BITS);
        }
        return load(wide);
#endif
    }

    void store(float* to) const {
        SEGUE_UNROLL for (int number = 0; number < PARTS; number++) *(Unaligned*)(to + number * WIDTH) = part[number];
    }

    void store(float* to, int count) const {
        if (count == LANES) return store(to);
        float values[LANES];
        store(values);
        std::memcpy(to, values, count * sizeof(float));
    }

    // Always the same tree: the result may not depend on the instruction set.
    float sum() const {
        float values[LANES];
        store(values);
        for (int half = LANES / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++) values[lane] += values[lane + half];
        return values[0];
    }

    float max() const {
        float values[LANES];
        store(values);
        float highest = values[0];
        for (float value : values) highest = value > highest ? value : highest;
        return highest;
    }
};

inline Lanes operator+(Lanes a, const Lanes& b) {
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++) a.part[part] += b.part[part];
    return a;
}

inline Lanes operator-(Lanes a, const Lanes& b) {
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++) a.part[part] -= b.part[part];
    return a;
}

inline Lanes operator*(Lanes a, const Lanes& b) {
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++) a.part[part] *= b.part[part];
    return a;
}

inline Lanes operator/(Lanes a, const Lanes& b) {
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++) a.part[part] /= b.part[part];
    return a;
}

inline Lanes larger(Lanes a, const Lanes& b) {
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++)
        a.part[part] = a.part[part] > b.part[part] ? a.part[part] : b.part[part];
    return a;
}

inline Lanes smaller(Lanes a, const Lanes& b) {
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++)
        a.part[part] = a.part[part] < b.part[part] ? a.part[part] : b.part[part];
    return a;
}

// a * b + c
inline Lanes fma(const Lanes& a, const Lanes& b, Lanes c) {
#if defined(__AVX512F__)
    c.part[0] = (Register)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
#elif defined(__AVX2__) && defined(__FMA__)
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++) c.part[part] =
        (Register)_mm256_fmadd_ps((__m256)a.part[part], (__m256)b.part[part], (__m256)c.part[part]);
#else
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++) c.part[part] += a.part[part] * b.part[part];
#endif
    return c;
}

// e to the x for x up to 88, exactly 0 below -87: x = n ln 2 + r, a polynomial for e^r, n added to the exponent.
inline Lanes exp(const Lanes& x) {
    const Lanes magic = Lanes::broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Lanes shifted = fma(x, Lanes::broadcast(1.44269504f), magic);
    const Lanes n = shifted - magic;
    Lanes r = fma(n, Lanes::broadcast(-0.693359375f), x);
    r = fma(n, Lanes::broadcast(2.12194440e-4f), r);
    Lanes power = Lanes::broadcast(1.9875691500e-4f);
    for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        power = fma(power, r, Lanes::broadcast(coefficient));
    power = fma(power, r * r, r + Lanes::broadcast(1.0f));
    SEGUE_UNROLL for (int part = 0; part < PARTS; part++) {
        const IntRegister exponent = (IntRegister)shifted.part[part] << 23;
        const Register scaled = (Register)((IntRegister)power.part[part] + exponent);
        const Register finite = x.part[part] < -87.0f ? Register{} : scaled;
        power.part[part] = x.part[part] != x.part[part] ? x.part[part] : finite;
    }
    return power;
}

// cap * tanh(x / cap), by e to the 2x / cap; beyond 44 caps a tanh is 1
inline Lanes soft_cap(const Lanes& x, float cap) {
    const Lanes one = Lanes::broadcast(1.0f), zero = Lanes::broadcast(0.0f), most = Lanes::broadcast(88.0f);
    Lanes doubled = x * Lanes::broadcast(2.0f / cap);
    doubled = larger(doubled, zero - most);
    const Lanes power = exp(zero - larger(zero - doubled, zero - most));
    return Lanes::broadcast(cap) * ((power - one) / (power + one));
}

}  // namespace segue
