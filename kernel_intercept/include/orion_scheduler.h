/* C interface of libgpu_scheduler.so: the microbatches of a stage share its GPU by priority.
 *
 * The library is loaded with LD_PRELOAD (an absolute path). It stands before the driver's functions that launch kernels
 * and lets a launch through, or has its thread wait a little, by a policy. Each microbatch is a client: client 0 is high
 * priority (HP) and never waits, the others are best effort (BE). Whose launch it is follows from its stream alone, so a
 * backward pass on another thread counts for the client of its forward pass. A launch on a stream that no client has
 * bound (the default stream, a stream of NCCL), or while the scheduler does not run, or under stream capture, or in a
 * child after fork(), goes straight to the driver.
 *
 * Order of use: start_scheduler; on each microbatch's thread set_client_idx and bind_stream; work; unbind_stream; stop.
 *
 * Every function may be called from every thread. None throws. Functions that return int return 0 (or the number they
 * are asked for) on success and a negative orion_status otherwise; orion_last_error() then says why, in English.
 *
 * Environment, read by orion_start_scheduler (a value that cannot be read makes it return ORION_BAD_ARGUMENT):
 *   ORION_BE_MAX_WAIT_US      2000  no launch waits longer: what rules out deadlock. At least 1.
 *   ORION_BE_MAX_OUTSTANDING  2     BE launches, of all clients together, that the device may hold unfinished while
 *                                   client 0 is at work; 16 times as many while it is not. At least 1.
 *   ORION_SM_THRESHOLD        (half of the device's multiprocessors)  see orion_set_sm_threshold.
 *   ORION_KERNEL_INFO         (none)  a file for orion_load_kernel_info, for every client.
 * Read once:
 *   ORION_LOG_LEVEL           WARN  NONE, ERROR, WARN, INFO, DEBUG, TRACE or 0 to 5; the log goes to stderr. Why a function
 *                                   failed is INFO: its caller knows from orion_last_error.
 */
#ifndef ORION_SCHEDULER_H
#define ORION_SCHEDULER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ORION_ABI_VERSION 1
#define ORION_MAX_CLIENTS 256

enum orion_status {
  ORION_OK = 0,
  ORION_BAD_ARGUMENT = -1, /* also: an environment variable or a file that cannot be read, a device that is not there */
  ORION_ALREADY_RUNNING = -2,
  ORION_NO_DRIVER = -3,     /* libcuda.so.1 is not there, or finds no device */
  ORION_NOT_PRELOADED = -4, /* the process was started without LD_PRELOAD=.../libgpu_scheduler.so */
  ORION_NOT_RUNNING = -5
};

/* In which order launches of BE clients that wait are let through, once client 0 allows any. */
enum orion_mode {
  ORION_FIFO = 0,           /* as they came */
  ORION_MULTI_PRIORITY = 1, /* a client waits for every lower one that is busy; for client 0 alone once it has waited half
                               of ORION_BE_MAX_WAIT_US, and those launches go first, as they came */
  ORION_ROUND_ROBIN = 2     /* clients in turn; the default */
};

/* What happened to the launches of one client since start_scheduler or reset_state. */
typedef struct orion_stats {
  uint64_t submitted;   /* launches passed on to the driver */
  uint64_t queued;      /* those of them that had to wait */
  uint64_t starved;     /* those of them that waited ORION_BE_MAX_WAIT_US and were then let through whatever the policy says */
  uint64_t wait_ns;     /* sum of all waits */
  uint64_t max_wait_ns; /* longest wait */
  uint64_t waiting;     /* launches that wait now */
} orion_stats;

/* What happened in the process. The first three count from start_scheduler or reset_state, the others from the load. */
typedef struct orion_totals {
  uint64_t gated;    /* launches on bound streams: the sum of all clients' submitted */
  uint64_t passed;   /* launches on streams that no client has bound */
  uint64_t captured; /* launches on bound streams under capture: passed on, not gated */
  uint64_t hooked;   /* how often a library looked up a function that launches kernels and received ours */
  uint64_t unhooked; /* how often a library looked up a cuLaunch* function that this library does not know (WARN: which) */
  uint64_t unnamed;  /* kernels, each counted once, whose name the driver does not tell: they have no kernel info */
} orion_totals;

/* ORION_ABI_VERSION of the library: a binding refuses another than its own. */
int orion_abi_version(void);

/* 1 if the process was started with the library in LD_PRELOAD, else 0. */
int orion_is_preloaded(void);

/* Start to gate launches of clients 0 .. num_clients-1 on the device with this ordinal. CUDA should be initialised.
 * No thread is started. Nothing is bound yet; the mode is what set_mode said last. In the order of the checks:
 * ORION_BAD_ARGUMENT, ORION_ALREADY_RUNNING, ORION_NO_DRIVER, ORION_NOT_PRELOADED. */
int orion_start_scheduler(int num_clients, int device_id);

/* Let every waiting launch through, unbind all streams and gate no more. Statistics stay until the next start. */
void orion_stop_scheduler(void);

/* 1 between start_scheduler and stop_scheduler; 0 in a child after fork(). */
int orion_is_running(void);

/* Remember which client the calling thread works for; -1: none, as at first. Gates nothing by itself: bind_stream does. */
void orion_set_client_idx(int client);
int orion_get_client_idx(void);

/* Make launches on this stream (a CUstream or cudaStream_t) count for this client. A client may have several streams; a
 * stream that was bound moves. The stream must live until it is unbound or the scheduler stops.
 * ORION_BAD_ARGUMENT for the default streams (0, 1 and 2): all threads share them. ORION_NOT_RUNNING. */
int orion_bind_stream(int client, void* stream);

/* Launches on this stream pass through again. 0 also if it was not bound. */
int orion_unbind_stream(void* stream);

/* Wait until the client's streams have done all their work. */
void orion_sync_client_stream(int client);

/* Set the mode (orion_mode); takes effect at once, and stays over stop and start. */
int orion_set_mode(int mode);
int orion_get_mode(void);

/* A BE kernel whose class is known and is not that of client 0's last kernel, and which uses at most so many
 * multiprocessors, need not wait while client 0 is busy. get returns 0 before the first start. */
void orion_set_sm_threshold(int multiprocessors);
int orion_get_sm_threshold(void);

/* Read kernel profiles for a client, or for every client (-1), instead of those read before; at any time after start.
 * A CSV file with the header  Name,Profile,Memory_footprint,SM_usage,Duration  and a row per kernel:
 *   Name              of the kernel, as the driver has it (mangled) or demangled; in double quotes if it has commas
 *   Profile           1 compute-bound, 0 memory-bound, -1 neither is sure
 *   Memory_footprint  not used
 *   SM_usage          multiprocessors that the kernel occupies
 *   Duration          ns; not used
 * A Name that stands twice: the last row counts. Returns the number of rows, or a negative orion_status. */
int orion_load_kernel_info(int client, const char* csv_path);

/* Without effect: Orion needs to know a client's number of kernels because it looks profiles up by position; here they
 * are looked up by name. Kept so that programs that call it load. */
void orion_set_client_kernels(int client, int num_kernels);

int orion_get_stats(int client, orion_stats* stats);
int orion_get_totals(orion_totals* totals);

/* Set the statistics to zero (not waiting, hooked, unhooked). Bindings, kernel info and launches that wait stay. */
void orion_reset_state(void);

/* Why the last call of this thread that returned a negative status did so; "" if none did. Never NULL. The text is good
 * until the thread's next call. */
const char* orion_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
