/* Reads fragments of a file into memory, with their checksums: see checked_read.py, which has the same in Python.
 *
 * read_parts reads adjacent fragments into place, and casts each into a second place. read_pieces reads fragments of which parts
 * are needed. A block is read, added to its checksum, and cast or copied while it is in the cache of the core. The
 * interpreter's lock is released for the whole call: threads in Python that change hands after every block lose a third of
 * their time.
 *
 * A fragment is checked block by block: there is a checksum for each block (docs/reference/format.md, section 6). Stable ABI of Python
 * 3.10.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../format/_xxh3.h"

#ifdef FAST
#include <sys/uio.h>
#include <unistd.h>
#endif

enum { NOTHING = 0, BYTES = 1, BFLOAT16 = 2 }; /* what the second place receives; Comparison in casts.py */

#ifdef FAST

enum { PARTS = 64 };

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
    struct sums sums; /* of the block that begins at ``begin`` */
    size_t read, cast, begin;
    uint64_t *next; /* place of its checksum */
};

/* Adds what has been read of a part to the checksums of its blocks, which are of ``block`` bytes. */
static void check(const struct part *of, struct progress *now, uint64_t block)
{
    const uint8_t *place = (const uint8_t *)(uintptr_t)of->place;
    while (now->begin < of->size) {
        uint64_t left = of->size - now->begin, size = block && left >= 2 * block ? block : left;
        size_t got = now->read - now->begin, ready = got < size ? got : (size_t)size - 1; /* the last byte belongs to the last stripe */
        add_groups(&now->sums, place + now->begin + now->sums.done, (ready - now->sums.done) / GROUP);
        if (got < size)
            return;
        *now->next++ = finished(&now->sums, place + now->begin + now->sums.done, (size_t)size - now->sums.done, size);
        now->begin += (size_t)size;
        now->sums = start;
    }
}

/* Adds what has been read of a part to its checksums and to its second place. */
static void follow(const struct part *of, struct progress *now, int checks, uint64_t block)
{
    const uint8_t *place = (const uint8_t *)(uintptr_t)of->place;
    uint8_t *second = (uint8_t *)(uintptr_t)of->second;
    if (checks && of->size >= LONG)
        check(of, now, block);
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

static int read_all(int file, off_t *offset, const struct part *parts, struct progress *now, size_t count, size_t block, int checks,
                    uint64_t checked)
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
            follow(&parts[first], &now[first], checks, checked);
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

/* Copies what the bytes [at, at + size) of a fragment have of its pieces. */
static void take(const struct fragment *of, const struct piece *pieces, const uint8_t *data, uint64_t at, size_t size)
{
    for (uint64_t each = 0; each < of->pieces; each++) {
        uint64_t end = pieces[each].begin + pieces[each].size, from = pieces[each].begin > at ? pieces[each].begin : at;
        uint64_t to = end < at + size ? end : at + size, before = from - pieces[each].begin;
        if (from < to)
            deliver((uint8_t *)(uintptr_t)pieces[each].place + before / (pieces[each].kind == BFLOAT16 ? 2 : 1), data + (from - at),
                    (size_t)(to - from), pieces[each].kind);
    }
}

/* Reads a fragment in steps of ``step`` bytes into ``memory`` after its first BEFORE bytes. It has one checksum. Stops at an error,
 * with ``offset`` at its place. */
static int read_fragment(int file, const struct fragment *of, const struct piece *pieces, uint8_t *memory, size_t step,
                         int checks, off_t *offset, uint64_t *checksum)
{
    struct sums sums = start;
    uint8_t *data = memory + BEFORE;
    size_t held = 0; /* bytes right before ``data`` that have not been added */
    *offset = (off_t)of->offset;
    for (uint64_t at = 0; at < of->size; at += step) {
        size_t size = of->size - at < step ? (size_t)(of->size - at) : step, ready;
        int error = read_whole(file, data, size, offset), last = at + size == of->size;
        if (error)
            return error;
        take(of, pieces, data, at, size);
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

/* As ``read_fragment`` for a fragment of several blocks, which has a checksum for each. ``memory`` has room for a step and a block. */
static int read_in_blocks(int file, const struct fragment *of, const struct piece *pieces, uint8_t *memory, size_t step, int checks,
                          uint64_t block, off_t *offset, uint64_t *checksum)
{
    uint64_t left = blocks_of(of->size, block), several = step / block ? step / block : 1;
    *offset = (off_t)of->offset;
    for (uint64_t at = 0; left;) {
        uint64_t count = left < several ? left : several;
        size_t size = (size_t)(count == left ? of->size - at : count * block);
        int error = read_whole(file, memory, size, offset);
        if (error)
            return error;
        take(of, pieces, memory, at, size);
        for (uint64_t each = 0; each < count && checks; each++)
            *checksum++ = sum_of(memory + each * block, each + 1 < count ? (size_t)block : size - (size_t)(each * block));
        left -= count;
        at += size;
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
    Py_ssize_t size, count, step, total = 0;
    long long begin;
    unsigned long long block;
    int file, checks, error;
    struct part *parts = NULL;
    struct progress *now = NULL;
    uint64_t *sums = NULL;
    PyObject *found = NULL;
    off_t offset;
    (void)module;
    if (!PyArg_ParseTuple(args, "iLy#npK", &file, &begin, &table, &size, &step, &checks, &block))
        return NULL;
    count = size / (Py_ssize_t)sizeof *parts;
    if (size % (Py_ssize_t)sizeof *parts || step < 1 || (block && block < LONG)) {
        PyErr_SetString(PyExc_ValueError, "a part has four integers of 64 bits, and a step and a block have a size");
        return NULL;
    }
    parts = malloc((size_t)size + 1);
    now = malloc((size_t)count * sizeof *now + 1);
    if (!parts || !now) {
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
        total += (Py_ssize_t)blocks_of(parts[at].size, block);
    }
    sums = calloc((size_t)total + 1, sizeof *sums); /* 0 for a part of less than LONG bytes */
    if (!sums) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t at = 0, place = 0; at < count; at++) {
        now[at] = (struct progress){start, 0, 0, 0, sums + place};
        place += (Py_ssize_t)blocks_of(parts[at].size, block);
    }
    offset = (off_t)begin;
    Py_BEGIN_ALLOW_THREADS
    error = read_all(file, &offset, parts, now, (size_t)count, (size_t)step, checks, block);
    Py_END_ALLOW_THREADS
    found = answer(error, offset, sums, total);
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
    Py_ssize_t fragments_size, pieces_size, step, count, total = 0;
    unsigned long long block;
    int file, checks, error = 0;
    uint64_t taken = 0, *sums = NULL;
    uint8_t *memory = NULL;
    struct fragment *all = NULL;
    struct piece *needed = NULL;
    PyObject *found = NULL;
    off_t offset = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "iy#y#npK", &file, &fragments, &fragments_size, &pieces, &pieces_size, &step, &checks, &block))
        return NULL;
    count = fragments_size / (Py_ssize_t)sizeof *all;
    if (fragments_size % (Py_ssize_t)sizeof *all || pieces_size % (Py_ssize_t)sizeof *needed || step < BEFORE || step % 16 ||
        (block && (block < LONG || block % 16 || block > PY_SSIZE_T_MAX / 4))) {
        PyErr_SetString(PyExc_ValueError, "a fragment has three integers, a piece four, a step 1,088 bytes or more, a block 241");
        return NULL;
    }
    all = malloc((size_t)fragments_size + 1);
    needed = malloc((size_t)pieces_size + 1);
    memory = malloc((size_t)step + 2 * (size_t)block + BEFORE);
    if (!all || !needed || !memory) {
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
        total += (Py_ssize_t)blocks_of(all[at].size, block);
    }
    sums = calloc((size_t)total + 1, sizeof *sums);
    if (!sums) {
        PyErr_NoMemory();
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    taken = 0;
    for (Py_ssize_t at = 0, place = 0; at < count && !error; at++) {
        uint64_t blocks = blocks_of(all[at].size, block);
        if (blocks == 1)
            error = read_fragment(file, &all[at], needed + taken, memory, (size_t)step, checks, &offset, sums + place);
        else
            error = read_in_blocks(file, &all[at], needed + taken, memory, (size_t)step, checks, block, &offset, sums + place);
        taken += all[at].pieces;
        place += (Py_ssize_t)blocks;
    }
    Py_END_ALLOW_THREADS
    found = answer(error, offset, sums, total);
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
    {"read_parts", read_parts, METH_VARARGS, "Read adjacent parts of a file; return 64 bits for each of their blocks: its checksum."},
    {"read_pieces", read_pieces, METH_VARARGS, "Read fragments of which pieces are needed; return 64 bits for each of their blocks: its checksum."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_checked_read", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__checked_read(void)
{
    return PyModule_Create(&definition);
}
