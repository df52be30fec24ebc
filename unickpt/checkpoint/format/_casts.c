/* Copies of dense host memory that also tell whether a second buffer is the cast of the source: see casts.py, which has the
 * same in Python.
 *
 * One pass reads source and second buffer once. On x86 it writes past the cache, so the target is not read first. A copy by
 * torch reads source and target and writes the target.
 *
 * Stable ABI of Python 3.10. The interpreter's lock is released for the whole call.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#define STREAMS 1
#endif

enum { NOTHING = 0, BYTES = 1, BFLOAT16 = 2 }; /* what the second buffer is compared with; Comparison in casts.py */

#define BLOCK 4096 /* bytes of the source that are copied, then compared while they are in the first cache */

static void copy_block(uint8_t *target, const uint8_t *source, size_t size)
{
    size_t at = 0;
#ifdef STREAMS
    for (; at + 64 <= size; at += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(source + at)), b = _mm_loadu_si128((const __m128i *)(source + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + at + 32)), d = _mm_loadu_si128((const __m128i *)(source + at + 48));
        _mm_stream_si128((__m128i *)(target + at), a);
        _mm_stream_si128((__m128i *)(target + at + 16), b);
        _mm_stream_si128((__m128i *)(target + at + 32), c);
        _mm_stream_si128((__m128i *)(target + at + 48), d);
    }
#endif
    memcpy(target + at, source + at, size - at);
}

/* Whether each 16-bit value is the float rounded to nearest, ties to even. A NaN is no cast: torch has two of them. */
static int is_bfloat16(const uint8_t *value, const uint8_t *source, size_t size)
{
    uint32_t differs = 0;
    for (size_t at = 0; at < size / 4; at++) {
        uint32_t bits;
        uint16_t found;
        memcpy(&bits, source + 4 * at, 4);
        memcpy(&found, value + 2 * at, 2);
        differs |= (bits + 0x7fff + (bits >> 16 & 1)) >> 16 ^ found;
        differs |= (bits & 0x7fffffff) > 0x7f800000;
    }
    return !differs;
}

static int copied(uint8_t *target, const uint8_t *source, const uint8_t *value, size_t size, int comparison)
{
    int same = 1;
    size_t step = BLOCK - (uintptr_t)target % 64; /* streams write whole lines of the cache */
    for (size_t at = 0; at < size; at += step, step = BLOCK) {
        if (step > size - at)
            step = size - at;
        if (target) {
            if ((uintptr_t)(target + at) % 64)
                memcpy(target + at, source + at, step);
            else
                copy_block(target + at, source + at, step);
        }
        if (same && comparison == BYTES)
            same = !memcmp(value + at, source + at, step);
        else if (same && comparison == BFLOAT16)
            same = is_bfloat16(value + at / 2, source + at, step);
        if (!same && !target)
            break;
    }
#ifdef STREAMS
    _mm_sfence();
#endif
    return same;
}

struct one { /* of the copies of a call: five native 64-bit integers */
    uint64_t target, source, value, size, comparison;
};

static int is_valid(const struct one *each)
{
    int known = each->comparison <= BFLOAT16 && each->size <= PY_SSIZE_T_MAX;
    return known && (each->comparison != BFLOAT16 || (each->size % 4 == 0 && each->target % 4 == 0));
}

static PyObject *copies(PyObject *module, PyObject *args)
{
    const char *table;
    Py_ssize_t size, count;
    struct one each;
    PyObject *found;
    char *same;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#", &table, &size))
        return NULL;
    count = size / (Py_ssize_t)sizeof each;
    if (size % (Py_ssize_t)sizeof each) {
        PyErr_SetString(PyExc_ValueError, "a copy has five integers of 64 bits");
        return NULL;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        memcpy(&each, table + at * sizeof each, sizeof each);
        if (!is_valid(&each)) {
            PyErr_SetString(PyExc_ValueError, "size or comparison out of range");
            return NULL;
        }
    }
    same = malloc((size_t)count + 1);
    if (!same)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        memcpy(&each, table + at * sizeof each, sizeof each);
        same[at] = (char)copied((uint8_t *)(uintptr_t)each.target, (const uint8_t *)(uintptr_t)each.source,
                                (const uint8_t *)(uintptr_t)each.value, (size_t)each.size, (int)each.comparison);
    }
    Py_END_ALLOW_THREADS
    found = PyBytes_FromStringAndSize(same, count);
    free(same);
    return found;
}

#define SAMPLED 65536 /* bytes, of which one word is looked at */

/* A number that depends on the first and the last word, and on one of every SAMPLED bytes. */
static uint64_t sampled(const uint8_t *region, size_t size)
{
    uint64_t found = size, word = 0;
    size_t at = 0;
    if (size < sizeof word) {
        memcpy(&word, region, size);
        return (found ^ word) * 0x9e3779b97f4a7c15u;
    }
    for (size_t block = 0; block < size; block += SAMPLED) {
        memcpy(&word, region + at, sizeof word);
        found = (found ^ word) * 0x9e3779b97f4a7c15u;
        found ^= found >> 29;
        at = block + SAMPLED + (block / SAMPLED * 2654435761u % (SAMPLED / 8)) * 8;
        if (at > size - sizeof word)
            at = size - sizeof word;
    }
    memcpy(&word, region + size - sizeof word, sizeof word);
    return (found ^ word) * 0x9e3779b97f4a7c15u;
}

static PyObject *samples(PyObject *module, PyObject *args)
{
    const char *table;
    Py_ssize_t size, count;
    uint64_t each[2]; /* address, size */
    PyObject *found;
    char *numbers;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#", &table, &size))
        return NULL;
    if (size % (Py_ssize_t)sizeof each) {
        PyErr_SetString(PyExc_ValueError, "a region has two integers of 64 bits");
        return NULL;
    }
    count = size / (Py_ssize_t)sizeof each;
    found = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof each[0]);
    numbers = found ? PyBytes_AsString(found) : NULL;
    if (!numbers)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        uint64_t number;
        memcpy(each, table + at * (Py_ssize_t)sizeof each, sizeof each);
        number = sampled((const uint8_t *)(uintptr_t)each[0], (size_t)each[1]);
        memcpy(numbers + at * (Py_ssize_t)sizeof number, &number, sizeof number);
    }
    Py_END_ALLOW_THREADS
    return found;
}

static PyMethodDef methods[] = {
    {"samples", samples, METH_VARARGS, "Return a 64-bit number for each region of memory, made from a word of every 64 KiB."},
    {"copies", copies, METH_VARARGS, "Make copies, and return a byte for each: 1 if its value is the cast of its source, else 0."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_casts", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__casts(void)
{
    return PyModule_Create(&definition);
}
