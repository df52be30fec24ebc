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

static PyObject *copy(PyObject *module, PyObject *args)
{
    unsigned long long target, source, value;
    Py_ssize_t size;
    int comparison, same;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKni", &target, &source, &value, &size, &comparison))
        return NULL;
    if (size < 0 || comparison < NOTHING || comparison > BFLOAT16 || (comparison == BFLOAT16 && (size % 4 || target % 4))) {
        PyErr_SetString(PyExc_ValueError, "size or comparison out of range");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    same = copied((uint8_t *)(uintptr_t)target, (const uint8_t *)(uintptr_t)source, (const uint8_t *)(uintptr_t)value,
                  (size_t)size, comparison);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(same);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "Copy from one address to another, and return whether a third holds the cast of the source."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_casts", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__casts(void)
{
    return PyModule_Create(&definition);
}
