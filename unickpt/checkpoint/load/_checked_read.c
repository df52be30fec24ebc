/* Reads fragments of a file into memory, with their checksums: see checked_read.py, which has the same in Python.
 *
 * read_parts reads adjacent fragments into place, and casts each into a second place. read_pieces reads fragments of which parts
 * are needed. A block is read, added to its checksum, and cast or copied while it is in the cache of the core. The
 * interpreter's lock is released for the whole call: threads in Python that change hands after every block lose a third of
 * their time.
 *
 * Stable ABI of Python 3.10. The checksum is xxh3_64 of https://github.com/Cyan4973/xxHash (doc/xxhash_spec.md, "XXH3 algorithm
 * description", inputs of more than 240 bytes), with the instructions of AVX2.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#define FAST 1
#include <immintrin.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

enum { NOTHING = 0, BYTES = 1, BFLOAT16 = 2 }; /* what the second place receives; Comparison in casts.py */

#ifdef FAST

enum { LANES = 8, STRIPE = 64, SECRET = 192, GROUP = 1024 /* stripes between two scrambles */, LONG = 241, PARTS = 64 };

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

/* Writes past the cache: the target is not read first, and does not displace what was read. */
static void copy(uint8_t *target, const uint8_t *source, size_t size)
{
    size_t at = -(uintptr_t)target % 16;
    if (at > size)
        at = size;
    memcpy(target, source, at);
    for (; at + 16 <= size; at += 16)
        _mm_stream_si128((__m128i *)(target + at), _mm_loadu_si128((const __m128i *)(source + at)));
    memcpy(target + at, source + at, size - at);
    _mm_sfence();
}

/* As torch casts: to nearest, ties to even; every NaN becomes the same one. */
__attribute__((target("avx2"))) static void to_bfloat16(uint8_t *target, const uint8_t *source, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        uint32_t bits;
        uint16_t found;
        memcpy(&bits, source + 4 * at, 4);
        found = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        memcpy(target + 2 * at, &found, 2);
    }
}

/* Writes the bytes [source, source + size) into their second place. */
static void deliver(uint8_t *target, const uint8_t *source, size_t size, uint64_t kind)
{
    if (kind == BYTES)
        copy(target, source, size);
    else if (kind == BFLOAT16)
        to_bfloat16(target, source, size / 4);
}

struct part { /* of the ranges of a call: four native 64-bit integers */
    uint64_t place, size, second, kind;
};

struct progress { /* of a part */
    struct sums sums;
    size_t read, cast;
    uint64_t checksum; /* 0 for a part of less than LONG bytes */
};

/* Adds what has been read of a part to its checksum and to its second place. */
static void follow(const struct part *of, struct progress *now, int checks)
{
    const uint8_t *place = (const uint8_t *)(uintptr_t)of->place;
    uint8_t *second = (uint8_t *)(uintptr_t)of->second;
    size_t ready = now->read < of->size ? now->read : (size_t)of->size - 1; /* the last byte belongs to the last stripe */
    if (checks && of->size >= LONG) {
        add_groups(&now->sums, place + now->sums.done, (ready - now->sums.done) / GROUP);
        if (now->read == of->size)
            now->checksum = finished(&now->sums, place + now->sums.done, (size_t)of->size - now->sums.done, of->size);
    }
    if (of->kind != NOTHING)
        deliver(second + now->cast / (of->kind == BFLOAT16 ? 2 : 1), place + now->cast, now->read - now->cast, of->kind);
    now->cast = of->kind == BFLOAT16 ? now->read / 4 * 4 : now->read;
}

/* Reads a block: parts from ``first`` on. Returns the bytes read, 0 at the end of the file, or -1 and errno. */
static Py_ssize_t read_block(int file, off_t offset, const struct part *parts, struct progress *now, size_t first, size_t count,
                             size_t block)
{
    struct iovec into[PARTS];
    int filled = 0;
    for (size_t at = first; at < count && filled < PARTS && block; at++) {
        size_t size = (size_t)parts[at].size - now[at].read;
        if (size > block)
            size = block;
        into[filled].iov_base = (void *)(uintptr_t)(parts[at].place + now[at].read);
        into[filled++].iov_len = size;
        block -= size;
    }
    return preadv(file, into, filled, offset);
}

static int read_all(int file, off_t *offset, const struct part *parts, struct progress *now, size_t count, size_t block, int checks)
{
    for (size_t first = 0; first < count;) {
        size_t got;
        Py_ssize_t found = read_block(file, *offset, parts, now, first, count, block);
        if (found < 0 && errno == EINTR)
            continue;
        if (found <= 0)
            return found < 0 ? errno : EOF;
        *offset += found;
        for (got = (size_t)found; got; first++) {
            size_t size = (size_t)parts[first].size - now[first].read;
            if (size > got)
                size = got;
            now[first].read += size;
            got -= size;
            follow(&parts[first], &now[first], checks);
            if (now[first].read < parts[first].size)
                break;
        }
    }
    return 0;
}

struct fragment { /* of the fragments of a call: three native 64-bit integers */
    uint64_t offset, size, pieces;
};

struct piece { /* a part of a fragment that is needed: four native 64-bit integers */
    uint64_t begin, size, place, kind;
};

enum { BEFORE = GROUP + STRIPE }; /* bytes before a block that its checksum may need */

static int read_whole(int file, uint8_t *into, size_t size, off_t *offset)
{
    while (size) {
        Py_ssize_t found = pread(file, into, size, *offset);
        if (found < 0 && errno == EINTR)
            continue;
        if (found <= 0)
            return found < 0 ? errno : EOF;
        *offset += found;
        into += found;
        size -= (size_t)found;
    }
    return 0;
}

/* Reads a fragment block by block into ``memory`` after its first BEFORE bytes. Stops at an error, with ``offset`` at its place. */
static int read_fragment(int file, const struct fragment *of, const struct piece *pieces, uint8_t *memory, size_t block,
                         int checks, off_t *offset, uint64_t *checksum)
{
    struct sums sums = start;
    uint8_t *data = memory + BEFORE;
    size_t held = 0; /* bytes right before ``data`` that have not been added */
    *offset = (off_t)of->offset;
    for (uint64_t at = 0; at < of->size; at += block) {
        size_t size = of->size - at < block ? (size_t)(of->size - at) : block, ready;
        int error = read_whole(file, data, size, offset), last = at + size == of->size;
        if (error)
            return error;
        for (uint64_t each = 0; each < of->pieces; each++) {
            uint64_t end = pieces[each].begin + pieces[each].size, from = pieces[each].begin > at ? pieces[each].begin : at;
            uint64_t to = end < at + size ? end : at + size, before = from - pieces[each].begin;
            if (from < to)
                deliver((uint8_t *)(uintptr_t)pieces[each].place + before / (pieces[each].kind == BFLOAT16 ? 2 : 1),
                        data + (from - at), (size_t)(to - from), pieces[each].kind);
        }
        if (!checks)
            continue;
        ready = (held + size - (last ? 1 : 0)) / GROUP;
        add_groups(&sums, data - held, ready);
        held = held + size - ready * GROUP;
        if (last)
            *checksum = finished(&sums, data + size - held, held, of->size);
        else
            memmove(data - held - STRIPE, data + size - held - STRIPE, held + STRIPE);
    }
    return 0;
}

/* Returns the checksums; raises EOFError with the position, or OSError. */
static PyObject *answer(int error, off_t offset, const uint64_t *sums, Py_ssize_t count)
{
    if (!error)
        return PyBytes_FromStringAndSize((const char *)sums, count * (Py_ssize_t)sizeof *sums);
    if (error == EOF) {
        PyObject *end = PyLong_FromLongLong((long long)offset);
        PyErr_SetObject(PyExc_EOFError, end);
        Py_XDECREF(end);
        return NULL;
    }
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

#endif

static PyObject *is_fast(PyObject *module, PyObject *none)
{
    (void)module;
    (void)none;
#ifdef FAST
    return PyBool_FromLong(__builtin_cpu_supports("avx2"));
#else
    Py_RETURN_FALSE;
#endif
}

static PyObject *read_parts(PyObject *module, PyObject *args)
{
#ifdef FAST
    const char *table;
    Py_ssize_t size, count, block;
    long long begin;
    int file, checks, error;
    struct part *parts = NULL;
    struct progress *now = NULL;
    uint64_t *sums = NULL;
    PyObject *found = NULL;
    off_t offset;
    (void)module;
    if (!PyArg_ParseTuple(args, "iLy#np", &file, &begin, &table, &size, &block, &checks))
        return NULL;
    count = size / (Py_ssize_t)sizeof *parts;
    if (size % (Py_ssize_t)sizeof *parts || block < 1) {
        PyErr_SetString(PyExc_ValueError, "a part has four integers of 64 bits, and a block has a size");
        return NULL;
    }
    parts = malloc((size_t)size + 1);
    now = malloc((size_t)count * sizeof *now + 1);
    sums = malloc((size_t)count * sizeof *sums + 1);
    if (!parts || !now || !sums) {
        PyErr_NoMemory();
        goto end;
    }
    memcpy(parts, table, (size_t)size);
    for (Py_ssize_t at = 0; at < count; at++) {
        if (!parts[at].size || parts[at].size > PY_SSIZE_T_MAX || parts[at].kind > BFLOAT16 ||
            (parts[at].kind == BFLOAT16 && parts[at].size % 4)) {
            PyErr_SetString(PyExc_ValueError, "size or kind out of range");
            goto end;
        }
        now[at] = (struct progress){start, 0, 0, 0};
    }
    offset = (off_t)begin;
    Py_BEGIN_ALLOW_THREADS
    error = read_all(file, &offset, parts, now, (size_t)count, (size_t)block, checks);
    for (Py_ssize_t at = 0; at < count; at++)
        sums[at] = now[at].checksum;
    Py_END_ALLOW_THREADS
    found = answer(error, offset, sums, count);
end:
    free(parts);
    free(now);
    free(sums);
    return found;
#else
    (void)module;
    (void)args;
    PyErr_SetString(PyExc_NotImplementedError, "not on this processor");
    return NULL;
#endif
}

static PyObject *read_pieces(PyObject *module, PyObject *args)
{
#ifdef FAST
    const char *fragments, *pieces;
    Py_ssize_t fragments_size, pieces_size, block, count;
    int file, checks, error = 0;
    uint64_t taken = 0, *sums = NULL;
    uint8_t *memory = NULL;
    struct fragment *all = NULL;
    struct piece *needed = NULL;
    PyObject *found = NULL;
    off_t offset = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "iy#y#np", &file, &fragments, &fragments_size, &pieces, &pieces_size, &block, &checks))
        return NULL;
    count = fragments_size / (Py_ssize_t)sizeof *all;
    if (fragments_size % (Py_ssize_t)sizeof *all || pieces_size % (Py_ssize_t)sizeof *needed || block < BEFORE || block % 16) {
        PyErr_SetString(PyExc_ValueError, "a fragment has three integers, a piece four, and a block 1,088 bytes or more");
        return NULL;
    }
    all = malloc((size_t)fragments_size + 1);
    needed = malloc((size_t)pieces_size + 1);
    sums = calloc((size_t)count + 1, sizeof *sums);
    memory = malloc((size_t)block + BEFORE);
    if (!all || !needed || !sums || !memory) {
        PyErr_NoMemory();
        goto end;
    }
    memcpy(all, fragments, (size_t)fragments_size);
    memcpy(needed, pieces, (size_t)pieces_size);
    for (Py_ssize_t at = 0; at < count; at++) {
        if (all[at].size < LONG || all[at].size > PY_SSIZE_T_MAX || all[at].pieces > pieces_size / sizeof *needed - taken)
            goto refused;
        for (uint64_t each = taken; each < taken + all[at].pieces; each++) {
            const struct piece *one = &needed[each];
            if (one->size > all[at].size || one->begin > all[at].size - one->size || (one->kind != BYTES && one->kind != BFLOAT16) ||
                (one->kind == BFLOAT16 && (one->size % 4 || one->begin % 4)))
                goto refused;
        }
        taken += all[at].pieces;
    }
    Py_BEGIN_ALLOW_THREADS
    taken = 0;
    for (Py_ssize_t at = 0; at < count && !error; at++) {
        error = read_fragment(file, &all[at], needed + taken, memory, (size_t)block, checks, &offset, &sums[at]);
        taken += all[at].pieces;
    }
    Py_END_ALLOW_THREADS
    found = answer(error, offset, sums, count);
    goto end;
refused:
    PyErr_SetString(PyExc_ValueError, "size, place or kind out of range");
end:
    free(all);
    free(needed);
    free(sums);
    free(memory);
    return found;
#else
    (void)module;
    (void)args;
    PyErr_SetString(PyExc_NotImplementedError, "not on this processor");
    return NULL;
#endif
}

static PyMethodDef methods[] = {
    {"is_fast", is_fast, METH_NOARGS, "Whether this processor has the instructions that read_parts needs."},
    {"read_parts", read_parts, METH_VARARGS, "Read adjacent parts of a file; return 64 bits for each: its checksum."},
    {"read_pieces", read_pieces, METH_VARARGS, "Read fragments of which pieces are needed; return 64 bits for each: its checksum."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_checked_read", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__checked_read(void)
{
    return PyModule_Create(&definition);
}
