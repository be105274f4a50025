/* A library to be loaded before libnccl (LD_PRELOAD): works one fault in one rank at one of its NCCL calls.
 *
 * LOCKSTEP_NCCL_FAULT=rank:function:number:action:value
 *   rank      of the victim, as RANK has it
 *   function  such as ncclAllReduce
 *   number    which of its calls, from 0
 *   action    error  the call is not made and returns value (an ncclResult_t)
 *             async  the call is not made and succeeds; ncclCommGetAsyncError tells value from then on
 *             delay  the call is made after value milliseconds
 *             hang   the call never returns
 * When the fault happens, a JSON object is written to fired-nccl in LOCKSTEP_CHAOS_FOLDER.
 *
 * Programs that load libnccl by dlopen and ask that handle for functions, and those that NCCL is linked into, do not
 * come by here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int result_t;
typedef void *comm_t;
typedef void *stream_t;

enum { PASS = -1, SUCCESS = 0, SYSTEM_ERROR = 2 };

static atomic_int calls;
static atomic_int sticky;

static void note(const char *function, const char *action, int rank) {
    const char *folder = getenv("LOCKSTEP_CHAOS_FOLDER");
    char path[4096], text[512];
    struct timespec now;
    if (folder == NULL) {
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(path, sizeof path, "%s/fired-nccl", folder);
    int length = snprintf(text, sizeof text, "{\"action\":\"%s\",\"rank\":%d,\"where\":\"inside %s\",\"t_s\":%lld.%09ld}",
                          action, rank, function, (long long)now.tv_sec, now.tv_nsec);
    int file = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (file >= 0) {
        if (write(file, text, (size_t)length) != length) {
            perror("lockstep: nccl shim");
        }
        close(file);
    }
}

/* Returns what the call is to return at once, or PASS when it is to be made. */
static result_t fault(const char *function) {
    char wanted[64], action[16];
    int rank = 0, number = 0, value = 0;
    const char *spec = getenv("LOCKSTEP_NCCL_FAULT"), *own = getenv("RANK");
    if (spec == NULL || own == NULL ||
        sscanf(spec, "%d:%63[^:]:%d:%15[^:]:%d", &rank, wanted, &number, action, &value) != 5) {
        return PASS;
    }
    if (atoi(own) != rank || strcmp(wanted, function) != 0 || atomic_fetch_add(&calls, 1) != number) {
        return PASS;
    }
    if (strcmp(action, "error") == 0) {
        note(function, "error", rank);
        return value;
    }
    if (strcmp(action, "async") == 0) {
        note(function, "async_error", rank);
        atomic_store(&sticky, value);
        return SUCCESS;
    }
    if (strcmp(action, "delay") == 0) {
        struct timespec pause_for = {value / 1000, (value % 1000) * 1000000L};
        note(function, "slow", rank);
        nanosleep(&pause_for, NULL);
        return PASS;
    }
    if (strcmp(action, "hang") == 0) {
        note(function, "sleep", rank);
        for (;;) {
            pause();
        }
    }
    return PASS;
}

#define CALL(name, parameters, ...)                                                  \
    result_t name parameters {                                                       \
        static result_t(*real) parameters;                                           \
        result_t early = fault(#name);                                               \
        if (early != PASS) {                                                         \
            return early;                                                            \
        }                                                                            \
        if (real == NULL) {                                                          \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                               \
        }                                                                            \
        return real == NULL ? SYSTEM_ERROR : real(__VA_ARGS__);                      \
    }

CALL(ncclAllReduce, (const void *from, void *to, size_t count, int type, int op, comm_t comm, stream_t stream), from,
     to, count, type, op, comm, stream)
CALL(ncclBroadcast, (const void *from, void *to, size_t count, int type, int root, comm_t comm, stream_t stream), from,
     to, count, type, root, comm, stream)
CALL(ncclReduce, (const void *from, void *to, size_t count, int type, int op, int root, comm_t comm, stream_t stream),
     from, to, count, type, op, root, comm, stream)
CALL(ncclAllGather, (const void *from, void *to, size_t count, int type, comm_t comm, stream_t stream), from, to,
     count, type, comm, stream)
CALL(ncclReduceScatter, (const void *from, void *to, size_t count, int type, int op, comm_t comm, stream_t stream),
     from, to, count, type, op, comm, stream)
CALL(ncclSend, (const void *from, size_t count, int type, int peer, comm_t comm, stream_t stream), from, count, type,
     peer, comm, stream)
CALL(ncclRecv, (void *to, size_t count, int type, int peer, comm_t comm, stream_t stream), to, count, type, peer, comm,
     stream)

result_t ncclCommGetAsyncError(comm_t comm, result_t *error) {
    static result_t (*real)(comm_t, result_t *);
    if (atomic_load(&sticky) != SUCCESS) {
        *error = atomic_load(&sticky);
        return SUCCESS;
    }
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "ncclCommGetAsyncError");
    }
    return real == NULL ? SYSTEM_ERROR : real(comm, error);
}
