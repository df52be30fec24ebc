/* xxh3_64 of long inputs, of https://github.com/Cyan4973/xxHash (doc/xxhash_spec.md, "XXH3 algorithm description", inputs of more
 * than 240 bytes), with the instructions of AVX2. The extensions that read and write fragments share it.
 */

#ifndef UNICKPT_XXH3_H
#define UNICKPT_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#define FAST 1
#include <immintrin.h>

enum { LANES = 8, STRIPE = 64, SECRET = 192, GROUP = 1024 /* stripes between two scrambles */, LONG = 241 };

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define PRIME32_1 0x9E3779B1u
#define PRIME64_1 0x9E3779B185EBCA87u

/* The sums of a checksum after the first ``done`` bytes, a multiple of GROUP. */
struct sums {
    uint64_t lane[LANES];
    size_t done;
};

static const struct sums start = {
    {0xC2B2AE3Du, PRIME64_1, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u, 0x85EBCA77u, 0x27D4EB2F165667C5u,
     PRIME32_1},
    0,
};

__attribute__((target("avx2"))) static inline __m256i added(__m256i sum, const uint8_t *data, const uint8_t *key)
{
    __m256i value = _mm256_loadu_si256((const __m256i *)data);
    __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)key));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i crossed = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(sum, crossed));
}

__attribute__((target("avx2"))) static inline __m256i scrambled(__m256i sum, const uint8_t *key)
{
    __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    __m256i mixed = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const __m256i *)key));
    __m256i low = _mm256_mul_epu32(mixed, prime), high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

/* Adds whole groups of [data, data + size) that are not the last bytes of the input. */
__attribute__((target("avx2"))) static void add_groups(struct sums *to, const uint8_t *data, size_t groups)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)to->lane), b = _mm256_loadu_si256((const __m256i *)(to->lane + 4));
    for (size_t group = 0; group < groups; group++, data += GROUP) {
        for (int at = 0; at < GROUP / STRIPE; at++) {
            _mm_prefetch((const char *)data + STRIPE * at + 512, _MM_HINT_T0);
            a = added(a, data + STRIPE * at, secret + 8 * at);
            b = added(b, data + STRIPE * at + 32, secret + 8 * at + 32);
        }
        a = scrambled(a, secret + SECRET - STRIPE);
        b = scrambled(b, secret + SECRET - STRIPE + 32);
    }
    _mm256_storeu_si256((__m256i *)to->lane, a);
    _mm256_storeu_si256((__m256i *)(to->lane + 4), b);
    to->done += groups * GROUP;
}

static uint64_t word(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

/* Returns the checksum of ``size`` bytes. ``rest`` has the last ``left`` of them, which have not been added: at least one, at most
 * a group. The STRIPE bytes before them are in place, too. */
__attribute__((target("avx2"))) static uint64_t finished(const struct sums *of, const uint8_t *rest, size_t left, uint64_t size)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)of->lane), b = _mm256_loadu_si256((const __m256i *)(of->lane + 4));
    uint64_t lane[LANES], sum = size * PRIME64_1;
    size_t stripes = (left - 1) / STRIPE;
    const uint8_t *last = rest + left - STRIPE, *key = secret + SECRET - STRIPE - 7;
    for (size_t at = 0; at < stripes; at++) {
        a = added(a, rest + STRIPE * at, secret + 8 * at);
        b = added(b, rest + STRIPE * at + 32, secret + 8 * at + 32);
    }
    a = added(a, last, key);
    b = added(b, last + 32, key + 32);
    _mm256_storeu_si256((__m256i *)lane, a);
    _mm256_storeu_si256((__m256i *)(lane + 4), b);
    for (int at = 0; at < LANES; at += 2) {
        unsigned __int128 product = (unsigned __int128)(lane[at] ^ word(secret + 11 + 8 * at));
        product *= lane[at + 1] ^ word(secret + 19 + 8 * at);
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

/* Returns the checksum of ``size`` bytes in memory, at least LONG. */
static inline uint64_t sum_of(const uint8_t *data, size_t size)
{
    struct sums sums = start;
    add_groups(&sums, data, (size - 1) / GROUP);
    return finished(&sums, data + sums.done, size - sums.done, size);
}

#endif

/* A fragment is divided into blocks of this size; the last one also has the rest. 0: it is one block. */
static inline uint64_t blocks_of(uint64_t size, uint64_t block)
{
    return block && size / block ? size / block : 1;
}

#endif
