/* The usual calls of a process group, recorded without Python: see fast_path.py, which has the same in Python.
 *
 * Everything here runs with the interpreter's lock. What is unusual (other arguments, coalesced calls, calls that are timed on a
 * device, a group that is not known yet) goes to the function in Python that stands behind each method, so that there is one
 * description of it.
 *
 * Stable ABI of Python 3.10. No part of torch is included: tensors are asked by their Python attributes.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* As FORMAT in records.py; fast_path.py compares the sizes. */
#pragma pack(push, 1)
typedef struct {
    uint64_t begun;
    int64_t call_ns, start_ns, wait_ns, end_ns;
    uint64_t seq, elements_in, elements_out;
    uint16_t comm;
    uint8_t op, dtype;
    uint16_t flags;
    uint8_t phase, unused;
    int32_t peer, tag;
    uint32_t step, shape;
    uint64_t written;
} Record;
#pragma pack(pop)

enum { ASYNC = 1, FAILED = 8 };                  /* Flag */
enum { BACKWARD = 2 };                           /* Phase */
enum { ALL_REDUCE = 1, BROADCAST = 2, REDUCE = 3, ALL_GATHER = 4, REDUCE_SCATTER = 5, ALL_TO_ALL = 6, SEND = 16, RECEIVE = 17 };

static PyObject *s_numel, *s_dtype, *s_shape, *s_async, *s_root, *s_append;
static PyObject *method_type; /* types.MethodType */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void replace(PyObject **place, PyObject *value)
{
    PyObject *before = *place;
    *place = value;
    Py_XDECREF(before);
}

/* ------------------------------------------------------------------------------------------------ the state of a recorder */

typedef struct {
    PyObject_HEAD
    PyObject *memory;      /* keeps the ring mapped */
    PyObject *groups;      /* id of a group -> (number, counter of collectives, global ranks, pair, given or None) */
    PyObject *pending;     /* id of work -> (work, record, flags) */
    PyObject *dtypes;      /* dtype -> code */
    PyObject *in_backward; /* returns -1 outside of autograd */
    char *records;
    unsigned long long capacity, last;
    long long step;
    int phase, rank, blocked, waits_blocked;
} State;

static PyTypeObject *state_type;

static Record *slot(State *self, unsigned long long number)
{
    return (Record *)(self->records + (number - 1) % self->capacity * sizeof(Record));
}

/* Return the record, or NULL if its slot was reused. */
static Record *still(State *self, unsigned long long number)
{
    return number + self->capacity > self->last ? slot(self, number) : NULL;
}

static int state_init(State *self, PyObject *args, PyObject *kwargs)
{
    unsigned long long address;
    static char *names[] = {"memory", "address", "capacity", "rank", "dtypes", "in_backward", NULL};
    PyObject *memory, *dtypes, *in_backward;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKKiOO", names, &memory, &address, &self->capacity, &self->rank, &dtypes,
                                     &in_backward))
        return -1;
    if (!PyDict_Check(dtypes) || !self->capacity || !address) {
        PyErr_SetString(PyExc_ValueError, "a dict of dtypes, an address and a capacity are needed");
        return -1;
    }
    Py_INCREF(memory), Py_INCREF(dtypes), Py_INCREF(in_backward);
    replace((PyObject **)&self->memory, memory);
    replace((PyObject **)&self->dtypes, dtypes);
    replace((PyObject **)&self->in_backward, in_backward);
    replace((PyObject **)&self->groups, PyDict_New());
    replace((PyObject **)&self->pending, PyDict_New());
    self->records = (char *)(uintptr_t)address;
    return self->groups && self->pending ? 0 : -1;
}

static int state_traverse(State *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->memory);
    Py_VISIT(self->groups);
    Py_VISIT(self->pending);
    Py_VISIT(self->dtypes);
    Py_VISIT(self->in_backward);
    return 0;
}

static int state_clear(State *self)
{
    Py_CLEAR(self->memory);
    Py_CLEAR(self->groups);
    Py_CLEAR(self->pending);
    Py_CLEAR(self->dtypes);
    Py_CLEAR(self->in_backward);
    return 0;
}

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void state_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    state_clear((State *)self);
    free_object(self);
}

static PyObject *state_next(State *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(++self->last);
}

static PyMethodDef state_methods[] = {
    {"next", (PyCFunction)state_next, METH_NOARGS, "Return the number of a new record."},
    {NULL},
};

static PyMemberDef state_members[] = {
    {"last", T_ULONGLONG, offsetof(State, last), 0, NULL},
    {"step", T_LONGLONG, offsetof(State, step), 0, NULL},
    {"phase", T_INT, offsetof(State, phase), 0, NULL},
    {"blocked", T_INT, offsetof(State, blocked), 0, NULL},
    {"waits_blocked", T_INT, offsetof(State, waits_blocked), 0, NULL},
    {"groups", T_OBJECT_EX, offsetof(State, groups), READONLY, NULL},
    {"pending", T_OBJECT_EX, offsetof(State, pending), READONLY, NULL},
    {NULL},
};

static PyType_Slot state_slots[] = {
    {Py_tp_doc, "State of a recorder, as ``fast_path.State``."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, state_init},
    {Py_tp_dealloc, state_dealloc},
    {Py_tp_traverse, state_traverse},
    {Py_tp_clear, state_clear},
    {Py_tp_methods, state_methods},
    {Py_tp_members, state_members},
    {0, NULL},
};
static PyType_Spec state_spec = {
    "unickpt.diagnosis.recording._fast.State", sizeof(State), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, state_slots};

/* ------------------------------------------------------------------------------------------------- description of a call */

typedef struct {
    uint64_t in, out;
    uint32_t shape;
    int dtype, flags, peer, tag;
} Call;

/* All functions below return 0, or -1 with an exception: then the Python function makes the call and meets the same error. */

static int elements(PyObject *tensor, uint64_t *count)
{
    PyObject *found = PyObject_CallMethodObjArgs(tensor, s_numel, NULL);
    if (!found)
        return -1;
    *count = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

/* Describe the tensor whose shape all members share. Tensors are not subclasses of list, so a list ends in AttributeError. */
static int sample(State *self, PyObject *tensor, Call *call, int with_shape)
{
    PyObject *found = PyObject_GetAttr(tensor, s_dtype), *code;
    if (!found)
        return -1;
    code = PyDict_GetItemWithError(self->dtypes, found);
    Py_DECREF(found);
    call->dtype = code ? (int)PyLong_AsLong(code) : 0;
    if (PyErr_Occurred())
        return -1;
    if (!with_shape)
        return 0;
    found = PyObject_GetAttr(tensor, s_shape);
    if (!found)
        return -1;
    Py_hash_t hash = PyObject_Hash(found);
    Py_DECREF(found);
    call->shape = (uint32_t)hash;
    return hash == -1 ? -1 : 0;
}

static int option(PyObject *options, PyObject *name, long *value)
{
    PyObject *found = PyObject_GetAttr(options, name);
    if (!found)
        return -1;
    *value = found == Py_True ? 1 : found == Py_False ? 0 : PyLong_AsLong(found);
    Py_DECREF(found);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Return the only tensor of a list, borrowed; NULL without an exception if it is anything else. */
static PyObject *only(PyObject *tensors)
{
    return PyList_CheckExact(tensors) && PyList_Size(tensors) == 1 ? PyList_GetItem(tensors, 0) : NULL;
}

/* Describe a call. ``args``: the group and its arguments. Returns 1 if it is described, 0 if it is unusual, -1 with an exception. */
static int describe(State *self, int op, PyObject *args, Call *call)
{
    Py_ssize_t given = PyTuple_Size(args);
    PyObject *tensor, *first = given > 1 ? PyTuple_GetItem(args, 1) : NULL;
    long flag = 0, root = -1, tag;
    *call = (Call){.peer = -1};
    switch (op) {
    case ALL_REDUCE:
    case BROADCAST:
    case REDUCE:
        if (given != 3 || !(tensor = only(first)))
            return 0;
        if (elements(tensor, &call->in) || sample(self, tensor, call, 1) || option(PyTuple_GetItem(args, 2), s_async, &flag))
            return -1;
        if (op != ALL_REDUCE && option(PyTuple_GetItem(args, 2), s_root, &root))
            return -1;
        if (root != (int32_t)root)
            return 0;
        call->out = call->in;
        call->peer = (int)root;
        break;
    case ALL_GATHER:
    case REDUCE_SCATTER:
    case ALL_TO_ALL:
        if (given != (op == ALL_TO_ALL ? 6 : 4) || PyList_Check(first) || PyTuple_Check(first))
            return 0;
        tensor = PyTuple_GetItem(args, 2);
        if (elements(first, &call->out) || elements(tensor, &call->in))
            return -1;
        if (sample(self, op == REDUCE_SCATTER ? first : tensor, call, op != ALL_TO_ALL)) /* members may split differently */
            return -1;
        if (option(PyTuple_GetItem(args, given - 1), s_async, &flag))
            return -1;
        break;
    case SEND:
    case RECEIVE:
        if (given != 4 || !(tensor = only(first)))
            return 0;
        root = PyLong_AsLong(PyTuple_GetItem(args, 2));
        tag = PyLong_AsLong(PyTuple_GetItem(args, 3));
        if (PyErr_Occurred() || tag != (int32_t)tag || root != (int32_t)root)
            return PyErr_Occurred() ? -1 : 0;
        call->peer = (int)root;
        call->tag = (int)tag;
        if (elements(tensor, op == SEND ? &call->in : &call->out) || sample(self, tensor, call, 1))
            return -1;
        flag = 1;
        break;
    default:
        return 0;
    }
    call->flags = flag ? ASYNC : 0;
    return 1;
}

/* ------------------------------------------------------------------------------------------------- methods of process groups */

typedef struct {
    PyObject_HEAD
    PyObject *original, *fallback, *dict;
    State *state;
    int op;
} Method;

/* Write the record of a call. Returns its number; 0 if it is unusual; sets an exception on an error.
 * ``on_device``: whether it ends on a device, where nothing here sees it. Its number is then appended to ``given``. */
static unsigned long long begin(State *self, int op, PyObject *args, int *on_device)
{
    Call call;
    unsigned long long number = 0;
    PyObject *key = PyLong_FromVoidPtr(PyTuple_GetItem(args, 0)), *group, *counter, *found, *given;
    if (!key)
        return 0;
    group = PyDict_GetItemWithError(self->groups, key); /* borrowed: only the lock's holder removes groups */
    Py_DECREF(key);
    if (!group || !PyTuple_Check(group) || PyTuple_Size(group) != 5)
        return 0;
    Py_INCREF(group);
    given = PyTuple_GetItem(group, 4);
    *on_device = given != Py_None;
    if (describe(self, op, args, &call) != 1)
        goto done;
    if (call.peer >= 0) {
        found = PyTuple_GetItem(PyTuple_GetItem(group, 2), call.peer);
        if (!found)
            goto done;
        call.peer = (int)PyLong_AsLong(found);
    }
    if (op < SEND) {
        counter = PyTuple_GetItem(group, 1);
        Py_INCREF(counter);
    } else {
        PyObject *from = PyLong_FromLong(op == SEND ? self->rank : call.peer);
        PyObject *to = PyLong_FromLong(op == SEND ? call.peer : self->rank);
        counter = from && to ? PyObject_CallFunctionObjArgs(PyTuple_GetItem(group, 3), from, to, NULL) : NULL;
        Py_XDECREF(from);
        Py_XDECREF(to);
    }
    int phase = self->phase;
    if (counter && phase <= 1) {
        found = PyObject_CallNoArgs(self->in_backward);
        if (!found) {
            Py_DECREF(counter);
            goto done;
        }
        if (PyLong_AsLong(found) != -1)
            phase = BACKWARD;
        Py_DECREF(found);
    }
    /* From here on the call counts: a failure would leave a gap. */
    found = counter ? PyIter_Next(counter) : NULL;
    Py_XDECREF(counter);
    if (!found)
        goto done;
    uint64_t seq = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    number = ++self->last;
    int64_t now = now_ns();
    Record record = {
        .begun = number, .call_ns = now, .wait_ns = *on_device || call.flags & ASYNC ? 0 : now, .seq = seq,
        .elements_in = call.in, .elements_out = call.out, .comm = (uint16_t)PyLong_AsLong(PyTuple_GetItem(group, 0)), .op = (uint8_t)op,
        .dtype = (uint8_t)call.dtype, .flags = (uint16_t)call.flags, .phase = (uint8_t)phase, .peer = call.peer, .tag = call.tag,
        .step = (uint32_t)self->step, .shape = call.shape,
    };
    Record *place = slot(self, number);
    /* The number in front first, and the one at the end last: see ring.py. */
    *(volatile uint64_t *)&place->begun = number;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy((char *)place + sizeof place->begun, (char *)&record + sizeof record.begun, offsetof(Record, written) - sizeof record.begun);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    *(volatile uint64_t *)&place->written = number;
    if (*on_device) {
        PyObject *as_number = PyLong_FromUnsignedLongLong(number);
        found = as_number ? PyObject_CallMethodObjArgs(given, s_append, as_number, NULL) : NULL;
        Py_XDECREF(as_number);
        Py_XDECREF(found);
        PyErr_Clear(); /* out of memory: where the rank waits stays unknown */
    }
done:
    Py_DECREF(group);
    return number;
}

static void fail(State *self, unsigned long long number)
{
    Record *record = still(self, number);
    if (record)
        record->flags = FAILED;
}

/* Note the work of a call, which ends later. */
static int issue(State *self, PyObject *work, unsigned long long number, int flags)
{
    PyObject *key = PyLong_FromVoidPtr(work), *entry = Py_BuildValue("(OKi)", work, number, flags);
    int failed = !key || !entry || PyDict_SetItem(self->pending, key, entry);
    Py_XDECREF(key);
    Py_XDECREF(entry);
    return failed ? -1 : 0;
}

static PyObject *method_call(Method *self, PyObject *args, PyObject *kwargs)
{
    State *state = self->state;
    if (state->blocked || PyTuple_Size(args) < 2 || (kwargs && PyDict_Size(kwargs)))
        return PyObject_Call(self->fallback, args, kwargs);
    int on_device = 0;
    unsigned long long number = begin(state, self->op, args, &on_device);
    if (!number) {
        PyErr_Clear();
        return PyObject_Call(self->fallback, args, kwargs);
    }
    int flags = slot(state, number)->flags;
    PyObject *work = PyObject_Call(self->original, args, kwargs);
    if (on_device)
        return work;
    if (!work) {
        fail(state, number);
        return NULL;
    }
    if (work == Py_None) {
        Record *record = still(state, number);
        if (record)
            record->end_ns = now_ns();
    } else if (issue(state, work, number, flags)) {
        PyErr_Clear(); /* out of memory: the record stays without an end */
    }
    return work;
}

static PyObject *wait_call(Method *self, PyObject *args, PyObject *kwargs)
{
    State *state = self->state;
    PyObject *key = NULL, *entry = NULL, *done;
    unsigned long long number = 0;
    if (state->waits_blocked || PyTuple_Size(args) < 1)
        return PyObject_Call(self->fallback, args, kwargs);
    key = PyLong_FromVoidPtr(PyTuple_GetItem(args, 0));
    entry = key ? PyDict_GetItemWithError(state->pending, key) : NULL; /* borrowed */
    if (entry) {
        int flags = (int)PyLong_AsLong(PyTuple_GetItem(entry, 2));
        PyObject *call = PyTuple_GetItem(entry, 1);
        if (!PyLong_Check(call)) { /* several calls that were issued as one */
            Py_DECREF(key);
            return PyObject_Call(self->fallback, args, kwargs);
        }
        number = PyLong_AsUnsignedLongLong(call);
        Record *record = still(state, number);
        if (flags & ASYNC && record)
            record->wait_ns = now_ns();
        PyDict_DelItem(state->pending, key); /* the caller has the work */
    }
    Py_XDECREF(key);
    PyErr_Clear();
    done = PyObject_Call(self->original, args, kwargs);
    if (number && done) {
        Record *record = still(state, number);
        if (record)
            record->end_ns = now_ns();
    } else if (number) {
        fail(state, number);
    }
    return done;
}

static PyObject *method_get(PyObject *self, PyObject *object, PyObject *type)
{
    (void)type;
    if (!object) {
        Py_INCREF(self);
        return self;
    }
    return PyObject_CallFunctionObjArgs(method_type, self, object, NULL);
}

static int method_init(Method *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state", "original", "fallback", "op", NULL};
    PyObject *state, *original, *fallback;
    int op = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|i", names, &state, &original, &fallback, &op))
        return -1;
    if (!PyObject_TypeCheck(state, state_type)) {
        PyErr_SetString(PyExc_TypeError, "state: a State is needed");
        return -1;
    }
    Py_INCREF(state), Py_INCREF(original), Py_INCREF(fallback);
    replace((PyObject **)&self->original, original);
    replace((PyObject **)&self->fallback, fallback);
    replace((PyObject **)&self->state, state);
    self->op = op;
    return 0;
}

static int method_traverse(Method *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->original);
    Py_VISIT(self->fallback);
    Py_VISIT(self->dict);
    Py_VISIT(self->state);
    return 0;
}

static int method_clear(Method *self)
{
    Py_CLEAR(self->original);
    Py_CLEAR(self->fallback);
    Py_CLEAR(self->dict);
    Py_CLEAR(self->state);
    return 0;
}

static void method_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    method_clear((Method *)self);
    free_object(self);
}

static PyMemberDef method_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(Method, original), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Method, dict), READONLY, NULL},
    {NULL},
};

#define METHOD_SLOTS(call)                                                                                                   \
    {                                                                                                                        \
        {Py_tp_new, PyType_GenericNew}, {Py_tp_init, method_init}, {Py_tp_dealloc, method_dealloc},                          \
            {Py_tp_traverse, method_traverse}, {Py_tp_clear, method_clear}, {Py_tp_call, call}, {Py_tp_descr_get, method_get}, \
            {Py_tp_members, method_members}, {0, NULL},                                                                      \
    }
#define METHOD_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR)

static PyType_Slot call_slots[] = METHOD_SLOTS(method_call), wait_slots[] = METHOD_SLOTS(wait_call);
static PyType_Spec call_spec = {"unickpt.diagnosis.recording._fast.Method", sizeof(Method), 0, METHOD_FLAGS, call_slots};
static PyType_Spec wait_spec = {"unickpt.diagnosis.recording._fast.Wait", sizeof(Method), 0, METHOD_FLAGS, wait_slots};

/* ------------------------------------------------------------------------------------------------------------- the module */

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "The usual calls of a process group, recorded in C.", -1};

PyMODINIT_FUNC PyInit__fast(void)
{
    PyObject *made = PyModule_Create(&module), *types = PyImport_ImportModule("types");
    method_type = types ? PyObject_GetAttrString(types, "MethodType") : NULL;
    Py_XDECREF(types);
    s_numel = PyUnicode_InternFromString("numel");
    s_dtype = PyUnicode_InternFromString("dtype");
    s_shape = PyUnicode_InternFromString("shape");
    s_async = PyUnicode_InternFromString("asyncOp");
    s_root = PyUnicode_InternFromString("rootRank");
    s_append = PyUnicode_InternFromString("append");
    state_type = (PyTypeObject *)PyType_FromSpec(&state_spec);
    PyObject *call = PyType_FromSpec(&call_spec), *wait = PyType_FromSpec(&wait_spec);
    if (!made || !method_type || !state_type || !call || !wait || !s_numel || !s_dtype || !s_shape || !s_async || !s_root ||
        !s_append)
        return NULL;
    Py_INCREF(state_type);
    if (PyModule_AddObject(made, "State", (PyObject *)state_type) || PyModule_AddObject(made, "Method", call) ||
        PyModule_AddObject(made, "Wait", wait) || PyModule_AddIntConstant(made, "RECORD_BYTES", sizeof(Record)))
        return NULL;
    return made;
}
