/* Checksums of the blocks of a fragment in memory: see checksums.py, which has the same in Python.
 *
 * Stable ABI of Python 3.10. The interpreter's lock is released for the whole call: training goes on.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#include "_xxh3.h"

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

static PyObject *block_sums(PyObject *module, PyObject *args)
{
#ifdef FAST
    unsigned long long address, size, block;
    uint64_t count, *sums;
    PyObject *found;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKK", &address, &size, &block))
        return NULL;
    if (size < LONG || size > PY_SSIZE_T_MAX || (block && block < LONG)) {
        PyErr_SetString(PyExc_ValueError, "fragments and blocks have 241 bytes or more");
        return NULL;
    }
    count = blocks_of(size, block);
    sums = malloc((size_t)count * sizeof *sums);
    if (!sums)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t each = 0; each < count; each++) {
        uint64_t at = each * block, end = each + 1 < count ? at + block : size;
        sums[each] = sum_of((const uint8_t *)(uintptr_t)address + at, (size_t)(end - at));
    }
    Py_END_ALLOW_THREADS
    found = PyBytes_FromStringAndSize((const char *)sums, (Py_ssize_t)(count * sizeof *sums));
    free(sums);
    return found;
#else
    (void)module;
    (void)args;
    PyErr_SetString(PyExc_NotImplementedError, "not on this processor");
    return NULL;
#endif
}

static PyMethodDef methods[] = {
    {"is_fast", is_fast, METH_NOARGS, "Whether this processor has the instructions that block_sums needs."},
    {"block_sums", block_sums, METH_VARARGS, "Return 64 bits for each block of address, size: its checksum."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_checksums", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__checksums(void)
{
    return PyModule_Create(&definition);
}
