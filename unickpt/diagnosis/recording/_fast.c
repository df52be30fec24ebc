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
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <x86intrin.h>
#define HAS_COUNTER 1
#endif

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

/* ------------------------------------------------------------------------------------------------------------- the clock
 *
 * Times are those of CLOCK_MONOTONIC. Where reading that takes long and the processor's counter is steady (see
 * processor_counter.py), they are counted on from the last reading. That is at most AGAIN_NS old, so that a change of the clock's
 * rate moves a time by less than a microsecond. A counter that disagrees with the clock is not used again. */

enum { AGAIN_NS = 1000000, RATE_NS = 1000000000, SLACK_NS = 1000, MOST_DRIFT = 1000 /* parts per million */ };

typedef struct {
    uint64_t ticks;
    int64_t ns;
} Instant;

typedef struct {
    int counts; /* whether times are counted on */
    Instant read, base; /* last reading; the reading that the rate is measured from */
    uint64_t again, narrow; /* ticks: until the next reading; within which a reading is exact */
    double ns_per_tick;
    int64_t last;
} Clock;

static Instant loaded; /* when the module was loaded: the begin of the first measurement of the rate */

static int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#ifdef HAS_COUNTER

/* Read counter and clock together. ``width``: ticks that it took, long if the thread was interrupted. */
static Instant both(uint64_t *width)
{
    uint64_t before = __rdtsc();
    int64_t ns = clock_ns();
    *width = __rdtsc() - before;
    return (Instant){before + *width / 2, ns};
}

static Instant narrowest(int tries, uint64_t *width)
{
    Instant best = both(width);
    while (--tries) {
        uint64_t other;
        Instant found = both(&other);
        if (other < *width)
            *width = other, best = found;
    }
    return best;
}

static int agree(const Clock *clock, Instant found)
{
    double passed = (double)(found.ns - clock->read.ns);
    double wrong = passed - (double)(found.ticks - clock->read.ticks) * clock->ns_per_tick;
    return (wrong < 0 ? -wrong : wrong) <= SLACK_NS + passed * MOST_DRIFT / 1e6;
}

/* Read the clock again, and count on from there. */
static int64_t read_again(Clock *clock)
{
    uint64_t width;
    Instant found = both(&width);
    if (width > clock->narrow) {
        found = narrowest(3, &width);
        if (width > clock->narrow) /* beside other work: the next call tries again */
            return clock_ns();
    }
    if (!agree(clock, found)) {
        clock->counts = 0;
        return found.ns;
    }
    clock->read = found;
    if (found.ns - clock->base.ns > RATE_NS) {
        clock->ns_per_tick = (double)(found.ns - clock->base.ns) / (double)(found.ticks - clock->base.ticks);
        clock->base = found;
    }
    return found.ns;
}

/* Begin to count if that takes less than half as long as reading the clock, and agrees with it. */
static void begin_to_count(Clock *clock)
{
    uint64_t width, counting = UINT64_MAX, reading = UINT64_MAX;
    for (int round = 0; round < 8; round++) {
        volatile uint64_t sink;
        uint64_t begin = __rdtsc();
        for (int at = 0; at < 16; at++)
            sink = __rdtsc();
        uint64_t middle = __rdtsc();
        for (int at = 0; at < 16; at++)
            sink = (uint64_t)clock_ns();
        uint64_t end = __rdtsc();
        (void)sink;
        counting = middle - begin < counting ? middle - begin : counting;
        reading = end - middle < reading ? end - middle : reading;
    }
    Instant first = narrowest(5, &width);
    while (first.ns - loaded.ns < 10 * AGAIN_NS) /* a rate measured over 10 ms is exact to some parts per million */
        first = narrowest(5, &width);
    clock->read = clock->base = first;
    clock->ns_per_tick = (double)(first.ns - loaded.ns) / (double)(first.ticks - loaded.ticks);
    clock->again = (uint64_t)(AGAIN_NS / clock->ns_per_tick);
    clock->narrow = 4 * width + (uint64_t)(100 / clock->ns_per_tick);
    Instant second = first;
    while (second.ns - first.ns < AGAIN_NS / 5)
        second = narrowest(5, &width);
    clock->counts = 2 * counting <= reading && width <= clock->narrow && agree(clock, second);
}

#endif

static int64_t now_ns(Clock *clock)
{
#ifdef HAS_COUNTER
    if (clock->counts) {
        uint64_t passed = __rdtsc() - clock->read.ticks; /* huge if the counter went back */
        int64_t now = passed < clock->again ? clock->read.ns + (int64_t)((double)passed * clock->ns_per_tick) : read_again(clock);
        if (now > clock->last) /* a reading may be behind what was counted */
            clock->last = now;
        return clock->last;
    }
#endif
    int64_t now = clock_ns();
    if (now < clock->last) /* after the last counted time */
        now = clock->last;
    return now;
}

static void replace(PyObject **place, PyObject *value)
{
    PyObject *before = *place;
    *place = value;
    Py_XDECREF(before);
}

/* ------------------------------------------------------------------------------------------------ the state of a recorder */

enum { PLACES = 8 }; /* a power of two */

typedef struct {
    PyObject *work; /* NULL: free */
    unsigned long long number;
    int flags;
} Issued;

typedef struct {
    PyObject_HEAD
    uint64_t last;
} Counter;

typedef struct {
    PyObject *id;     /* the group, which is only compared */
    PyObject *group;  /* its tuple in ``groups``, borrowed */
    Counter *counter; /* of collectives, borrowed */
    PyObject *given;  /* borrowed; NULL if its calls end on the host */
    uint16_t number;
} Known;

typedef struct {
    PyObject_HEAD
    PyObject *memory;      /* keeps the ring mapped */
    PyObject *groups;      /* id of a group -> (number, counter of collectives, global ranks, pair, given or None) */
    PyObject *pending;     /* id of work -> (work, record, flags) */
    PyObject *dtypes;      /* dtype -> code */
    PyObject *in_backward; /* returns -1 outside of autograd */
    PyObject *dtype;       /* the last one that was looked up, borrowed from ``dtypes`` */
    int dtype_code;
    Issued issued[PLACES]; /* work that is not in ``pending`` yet: usually it is waited for before anything else asks */
    Known known[PLACES];   /* groups that were used lately */
    Clock clock;
    char *records;
    unsigned long long capacity, last;
    long long step;
    int phase, rank, blocked, waits_blocked;
} State;

static PyTypeObject *state_type, *counter_type;

static unsigned place_of(const PyObject *object)
{
    return (unsigned)((uint64_t)(uintptr_t)object * 0x9E3779B97F4A7C15u >> 61);
}

static PyObject *counter_next(Counter *self)
{
    return PyLong_FromUnsignedLongLong(++self->last);
}

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot counter_slots[] = {
    {Py_tp_doc, "Counter from 1, as ``itertools.count(1)``."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, free_object},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, counter_next},
    {0, NULL},
};
static PyType_Spec counter_spec = {"unickpt.diagnosis.recording._fast.Counter", sizeof(Counter), 0, Py_TPFLAGS_DEFAULT, counter_slots};

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
    static char *names[] = {"memory", "address", "capacity", "rank", "dtypes", "in_backward", "counter", NULL};
    PyObject *memory, *dtypes, *in_backward;
    int counter = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKKiOO|p", names, &memory, &address, &self->capacity, &self->rank, &dtypes,
                                     &in_backward, &counter))
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
#ifdef HAS_COUNTER
    if (counter)
        begin_to_count(&self->clock);
#endif
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
    for (int at = 0; at < PLACES; at++)
        Py_VISIT(self->issued[at].work);
    return 0;
}

static int state_clear(State *self)
{
    memset(self->known, 0, sizeof self->known);
    self->dtype = NULL;
    for (int at = 0; at < PLACES; at++)
        Py_CLEAR(self->issued[at].work);
    Py_CLEAR(self->memory);
    Py_CLEAR(self->groups);
    Py_CLEAR(self->pending);
    Py_CLEAR(self->dtypes);
    Py_CLEAR(self->in_backward);
    return 0;
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

static PyObject *state_now(State *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLongLong(now_ns(&self->clock));
}

static PyObject *state_add_group(State *self, PyObject *args)
{
    PyObject *key, *group;
    if (!PyArg_ParseTuple(args, "OO!", &key, &PyTuple_Type, &group))
        return NULL;
    if (PyTuple_Size(group) != 5) {
        PyErr_SetString(PyExc_ValueError, "a group: five values are needed");
        return NULL;
    }
    memset(self->known, 0, sizeof self->known);
    if (PyDict_SetItem(self->groups, key, group))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *state_remove_group(State *self, PyObject *key)
{
    memset(self->known, 0, sizeof self->known);
    if (PyDict_DelItem(self->groups, key)) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError))
            return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

/* Move work into the dict. */
static int settle(State *self, Issued *place)
{
    Issued moved = *place;
    place->work = NULL;
    if (!moved.work)
        return 0;
    PyObject *key = PyLong_FromVoidPtr(moved.work), *entry = Py_BuildValue("(OKi)", moved.work, moved.number, moved.flags);
    int failed = !key || !entry || PyDict_SetItem(self->pending, key, entry);
    Py_XDECREF(key);
    Py_XDECREF(entry);
    Py_DECREF(moved.work);
    return failed ? -1 : 0;
}

static PyObject *state_pending(State *self, void *unused)
{
    (void)unused;
    for (int at = 0; at < PLACES; at++)
        if (settle(self, &self->issued[at]))
            return NULL;
    Py_INCREF(self->pending);
    return self->pending;
}

static PyMethodDef state_methods[] = {
    {"next", (PyCFunction)state_next, METH_NOARGS, "Return the number of a new record."},
    {"now", (PyCFunction)state_now, METH_NOARGS, "Return nanoseconds on the monotonic clock."},
    {"add_group", (PyCFunction)state_add_group, METH_VARARGS, "Record the calls of a group."},
    {"remove_group", (PyCFunction)state_remove_group, METH_O, "Leave the calls of a group to Python."},
    {NULL},
};

static PyGetSetDef state_values[] = {
    {"pending", (getter)state_pending, NULL, NULL, NULL},
    {NULL},
};

static PyMemberDef state_members[] = {
    {"last", T_ULONGLONG, offsetof(State, last), 0, NULL},
    {"step", T_LONGLONG, offsetof(State, step), 0, NULL},
    {"phase", T_INT, offsetof(State, phase), 0, NULL},
    {"blocked", T_INT, offsetof(State, blocked), 0, NULL},
    {"waits_blocked", T_INT, offsetof(State, waits_blocked), 0, NULL},
    {"counts", T_INT, offsetof(State, clock) + offsetof(Clock, counts), READONLY, NULL},
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
    {Py_tp_getset, state_values},
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

/* Describe the tensor whose shape all members share. Tensors are not subclasses of list, so a list ends in AttributeError.
 * ``count``: its elements, if they are wanted; this takes half as long as asking for them. */
static int sample(State *self, PyObject *tensor, Call *call, int with_shape, uint64_t *count)
{
    PyObject *found = PyObject_GetAttr(tensor, s_dtype);
    if (!found)
        return -1;
    if (found != self->dtype) {
        PyObject *code = PyDict_GetItemWithError(self->dtypes, found);
        self->dtype_code = code ? (int)PyLong_AsLong(code) : 0;
        self->dtype = code ? found : NULL;
    }
    Py_DECREF(found);
    call->dtype = self->dtype_code;
    if (PyErr_Occurred())
        return -1;
    if (!with_shape)
        return count ? elements(tensor, count) : 0;
    found = PyObject_GetAttr(tensor, s_shape);
    if (!found)
        return -1;
    Py_hash_t hash = PyObject_Hash(found);
    call->shape = (uint32_t)hash;
    if (hash != -1 && count && !PyTuple_Check(found)) {
        PyErr_SetString(PyExc_TypeError, "a shape is no tuple");
        hash = -1;
    } else if (hash != -1 && count) {
        *count = 1;
        for (Py_ssize_t at = 0, size = PyTuple_Size(found); at < size; at++)
            *count *= PyLong_AsUnsignedLongLong(PyTuple_GetItem(found, at));
        if (PyErr_Occurred()) /* a symbol */
            hash = -1;
    }
    Py_DECREF(found);
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
        if (sample(self, tensor, call, 1, &call->in) || option(PyTuple_GetItem(args, 2), s_async, &flag))
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
        if (op == REDUCE_SCATTER) {
            if (elements(tensor, &call->in) || sample(self, first, call, 1, &call->out))
                return -1;
        } else if (elements(first, &call->out) || sample(self, tensor, call, op != ALL_TO_ALL, &call->in)) {
            return -1; /* members of an all_to_all may split differently */
        }
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
        if (sample(self, tensor, call, 1, op == SEND ? &call->in : &call->out))
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

/* Return a group, NULL if it is not known: then there may be an exception. Only the lock's holder removes groups. */
static Known *known(State *self, PyObject *id)
{
    Known *found = &self->known[place_of(id)];
    if (found->id == id)
        return found;
    PyObject *key = PyLong_FromVoidPtr(id), *group = key ? PyDict_GetItemWithError(self->groups, key) : NULL; /* borrowed */
    Py_XDECREF(key);
    if (!group)
        return NULL;
    PyObject *counter = PyTuple_GetItem(group, 1), *given = PyTuple_GetItem(group, 4);
    long number = PyLong_AsLong(PyTuple_GetItem(group, 0));
    if (Py_TYPE(counter) != counter_type || PyErr_Occurred())
        return NULL;
    *found = (Known){id, group, (Counter *)counter, given == Py_None ? NULL : given, (uint16_t)number};
    return found;
}

/* Return the counter of a pair of ranks, or NULL with an exception. */
static Counter *pair(PyObject *pairs, long source, long destination)
{
    PyObject *from = PyLong_FromLong(source), *to = PyLong_FromLong(destination);
    PyObject *found = from && to ? PyObject_CallFunctionObjArgs(pairs, from, to, NULL) : NULL;
    Py_XDECREF(from);
    Py_XDECREF(to);
    if (found && Py_TYPE(found) != counter_type) {
        PyErr_SetString(PyExc_TypeError, "a Counter is needed");
        Py_CLEAR(found);
    }
    return (Counter *)found;
}

static void prefetch(const Record *record)
{
#ifdef __GNUC__
    __builtin_prefetch(record, 1);
    __builtin_prefetch((const char *)(record + 1) - 1, 1);
#else
    (void)record;
#endif
}

/* Write the record of a call. Returns its number; 0 if it is unusual; sets an exception on an error.
 * ``flags``: those of the record. ``on_device``: whether it ends on a device, where nothing here sees it. Its number is then
 * appended to ``given``. */
static unsigned long long begin(State *self, int op, PyObject *args, int *flags, int *on_device)
{
    Call call;
    unsigned long long number = 0;
    Known *place = known(self, PyTuple_GetItem(args, 0));
    if (!place)
        return 0;
    Known group = *place; /* a call of Python below may replace the place */
    PyObject *given = group.given;
    *on_device = given != NULL;
    Py_INCREF(group.group);
    Counter *counter = NULL;
    if (describe(self, op, args, &call) != 1)
        goto done;
    if (call.peer >= 0) {
        PyObject *found = PyTuple_GetItem(PyTuple_GetItem(group.group, 2), call.peer);
        if (!found)
            goto done;
        call.peer = (int)PyLong_AsLong(found);
    }
    if (op >= SEND) {
        PyObject *pairs = PyTuple_GetItem(group.group, 3);
        counter = op == SEND ? pair(pairs, self->rank, call.peer) : pair(pairs, call.peer, self->rank);
        if (!counter)
            goto done;
    } else {
        counter = group.counter;
        Py_INCREF((PyObject *)counter);
    }
    int phase = self->phase;
    if (phase <= 1) {
        PyObject *found = PyObject_CallNoArgs(self->in_backward);
        if (!found)
            goto done;
        if (PyLong_AsLong(found) != -1)
            phase = BACKWARD;
        Py_DECREF(found);
    }
    /* From here on the call counts, and nothing fails: that would leave a gap. */
    number = ++self->last;
    *flags = call.flags;
    int64_t now = now_ns(&self->clock);
    Record *record = slot(self, number);
    /* The number in front first, and the one at the end last: see ring.py. */
    *(volatile uint64_t *)&record->begun = number;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    record->call_ns = now;
    record->start_ns = 0;
    record->wait_ns = *on_device || call.flags & ASYNC ? 0 : now;
    record->end_ns = 0;
    record->seq = ++counter->last;
    record->elements_in = call.in;
    record->elements_out = call.out;
    record->comm = group.number;
    record->op = (uint8_t)op;
    record->dtype = (uint8_t)call.dtype;
    record->flags = (uint16_t)call.flags;
    record->phase = (uint8_t)phase;
    record->unused = 0;
    record->peer = call.peer;
    record->tag = call.tag;
    record->step = (uint32_t)self->step;
    record->shape = call.shape;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    *(volatile uint64_t *)&record->written = number;
    prefetch(slot(self, number + 1));
    if (given) {
        PyObject *as_number = PyLong_FromUnsignedLongLong(number);
        PyObject *found = as_number ? PyObject_CallMethodObjArgs(given, s_append, as_number, NULL) : NULL;
        Py_XDECREF(as_number);
        Py_XDECREF(found);
        PyErr_Clear(); /* out of memory: where the rank waits stays unknown */
    }
done:
    Py_XDECREF((PyObject *)counter);
    Py_DECREF(group.group);
    return number;
}

static void fail(State *self, unsigned long long number)
{
    Record *record = still(self, number);
    if (record)
        record->flags = FAILED;
}

static void end(State *self, unsigned long long number)
{
    Record *record = still(self, number);
    if (record)
        record->end_ns = now_ns(&self->clock);
}

/* Note the work of a call, which ends later. */
static int issue(State *self, PyObject *work, unsigned long long number, int flags)
{
    Issued *place = &self->issued[place_of(work)];
    int failed = settle(self, place); /* of an earlier work */
    Py_INCREF(work);
    *place = (Issued){work, number, flags};
    return failed;
}

static PyObject *method_call(Method *self, PyObject *args, PyObject *kwargs)
{
    State *state = self->state;
    if (state->blocked || PyTuple_Size(args) < 2 || (kwargs && PyDict_Size(kwargs)))
        return PyObject_Call(self->fallback, args, kwargs);
    int on_device = 0, flags = 0;
    unsigned long long number = begin(state, self->op, args, &flags, &on_device);
    if (!number) {
        PyErr_Clear();
        return PyObject_Call(self->fallback, args, kwargs);
    }
    PyObject *work = PyObject_Call(self->original, args, kwargs);
    if (on_device)
        return work;
    if (!work) {
        fail(state, number);
        return NULL;
    }
    if (work == Py_None)
        end(state, number);
    else if (issue(state, work, number, flags))
        PyErr_Clear(); /* out of memory: the record stays without an end */
    return work;
}

/* Take work out of the dict. Returns whether it is one call, in ``found``; -1 if it is several that were issued as one. */
static int taken(State *self, PyObject *work, Issued *found)
{
    if (!PyDict_Size(self->pending))
        return 0;
    PyObject *key = PyLong_FromVoidPtr(work), *entry = key ? PyDict_GetItemWithError(self->pending, key) : NULL; /* borrowed */
    int one = 0;
    if (entry) {
        PyObject *call = PyTuple_GetItem(entry, 1);
        one = PyLong_Check(call) ? 1 : -1;
        if (one > 0) {
            *found = (Issued){NULL, PyLong_AsUnsignedLongLong(call), (int)PyLong_AsLong(PyTuple_GetItem(entry, 2))};
            PyDict_DelItem(self->pending, key); /* the caller has the work */
        }
    }
    Py_XDECREF(key);
    PyErr_Clear();
    return one;
}

static PyObject *wait_call(Method *self, PyObject *args, PyObject *kwargs)
{
    State *state = self->state;
    if (state->waits_blocked || PyTuple_Size(args) < 1)
        return PyObject_Call(self->fallback, args, kwargs);
    PyObject *work = PyTuple_GetItem(args, 0);
    Issued *place = &state->issued[place_of(work)], found = {NULL, 0, 0};
    if (place->work == work) {
        found = *place;
        place->work = NULL;
        Py_DECREF(work); /* the caller has the work */
    } else if (taken(state, work, &found) < 0) {
        return PyObject_Call(self->fallback, args, kwargs);
    }
    Record *record = found.number && found.flags & ASYNC ? still(state, found.number) : NULL;
    if (record)
        record->wait_ns = now_ns(&state->clock);
    PyObject *done = PyObject_Call(self->original, args, kwargs);
    if (found.number && done)
        end(state, found.number);
    else if (found.number)
        fail(state, found.number);
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

/* --------------------------------------------------------------------------------------------------------- fatal signals
 *
 * A fatal signal may come in a thread that is not the main one, such as one of gloo that aborts. Python's fault handler can
 * then write the stacks of all threads, and reads frames that change meanwhile; or that of this thread alone. Here the main
 * thread is sent the signal on which it writes its own stack (stack_dumps.py), and the end of the process waits for that.
 * Nothing of Python is called, and what is called may be called in a signal handler. */

enum { FATAL_SIGNALS = 5, FATAL_LOOKS = 100, FATAL_LOOK_NS = 10000000 };
static const int fatal_numbers[FATAL_SIGNALS] = {SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGSEGV};
static const char fatal_other[] = "Signal in another thread\n";
static struct {
    int fd, number;
    pid_t process, main;
    struct sigaction before[FATAL_SIGNALS];
} fatal;

static void ask_main_thread(void)
{
    struct stat about;
    if (fstat(fatal.fd, &about) != 0 || syscall(SYS_tgkill, fatal.process, fatal.main, fatal.number) != 0)
        return;
    const off_t begin = about.st_size;
    off_t last = begin;
    for (int look = 0; look < FATAL_LOOKS; look++) {
        const struct timespec pause = {0, FATAL_LOOK_NS};
        nanosleep(&pause, NULL);
        if (fstat(fatal.fd, &about) != 0 || (about.st_size > begin && about.st_size == last))
            break;
        last = about.st_size;
    }
    if (write(fatal.fd, fatal_other, sizeof fatal_other - 1) < 0)
        return;
}

static void on_fatal(int number)
{
    const int saved = errno;
    if (getpid() == fatal.process && (pid_t)syscall(SYS_gettid) != fatal.main)
        ask_main_thread();
    for (int at = 0; at < FATAL_SIGNALS; at++)
        if (fatal_numbers[at] == number)
            sigaction(number, &fatal.before[at], NULL);
    errno = saved;
    raise(number); /* at once, in this thread: the handler before this one ends the process */
}

static PyObject *main_stack_first(PyObject *self, PyObject *args)
{
    int fd, number;
    (void)self;
    if (!PyArg_ParseTuple(args, "ii", &fd, &number))
        return NULL;
    fatal.fd = fd, fatal.number = number, fatal.process = fatal.main = getpid(); /* of Linux: a process is its main thread */
    struct sigaction own;
    memset(&own, 0, sizeof own);
    own.sa_handler = on_fatal;
    own.sa_flags = SA_NODEFER | SA_ONSTACK;
    sigemptyset(&own.sa_mask);
    for (int at = 0; at < FATAL_SIGNALS; at++) {
        struct sigaction before;
        if (sigaction(fatal_numbers[at], &own, &before) == 0 && before.sa_handler != on_fatal)
            fatal.before[at] = before;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"main_stack_first", main_stack_first, METH_VARARGS,
     "Before a fatal signal in another thread ends this process, send the main thread a signal on which it writes to a file.\n\n"
     "fd: the file; number: the signal. What was set before ends the process then."},
    {NULL},
};

/* ------------------------------------------------------------------------------------------------------------- the module */

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_fast", "The usual calls of a process group, recorded in C.", -1, functions,
};

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
    counter_type = (PyTypeObject *)PyType_FromSpec(&counter_spec);
    PyObject *call = PyType_FromSpec(&call_spec), *wait = PyType_FromSpec(&wait_spec);
    if (!made || !method_type || !state_type || !counter_type || !call || !wait || !s_numel || !s_dtype || !s_shape || !s_async || !s_root ||
        !s_append)
        return NULL;
#ifdef HAS_COUNTER
    uint64_t width;
    loaded = narrowest(5, &width);
#endif
    Py_INCREF(state_type), Py_INCREF(counter_type);
    if (PyModule_AddObject(made, "State", (PyObject *)state_type) || PyModule_AddObject(made, "Counter", (PyObject *)counter_type) || PyModule_AddObject(made, "Method", call) ||
        PyModule_AddObject(made, "Wait", wait) || PyModule_AddIntConstant(made, "RECORD_BYTES", sizeof(Record)))
        return NULL;
    return made;
}
