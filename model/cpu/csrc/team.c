/* A few threads that work in step: started once, woken for each step, meeting at barriers within it. */

#define _GNU_SOURCE /* affinities */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "pk.h"

struct pk_team {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint round; /* of the barrier; begins again at 0 after some hours */
    _Alignas(64) atomic_int task;
    _Alignas(64) atomic_long step; /* counts the steps begun; changed under `lock` */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    long roused; /* counts the calls of team_rouse; under `lock` */
    int stopping;
    int spins; /* most at a barrier */
    cpu_set_t allowed; /* processors that all threads may run on */
    int caller;        /* the one that the first thread was last seen on */
    void (*work)(pk_thread *, void *);
    void *argument;
    int count;
    pk_thread *thread;
    pthread_t *handle;
};

#define SPINS 4096 /* a few tens of microseconds; then whoever else wants the core may have it. None if threads have to
                      share one: the others would wait for who spins */

void team_wait(pk_thread *thread) {
    pk_team *team = thread->team;
    if (team->count == 1) {
        atomic_store_explicit(&team->task, 0, memory_order_relaxed);
        return;
    }
    unsigned round = atomic_load_explicit(&team->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->count - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->task, 0, memory_order_relaxed);
        atomic_store_explicit(&team->round, round + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->round, memory_order_acquire) == round; spins++) {
        if (spins < team->spins)
            _mm_pause();
        else
            sched_yield();
    }
}

int team_next_task(pk_thread *thread) { return atomic_fetch_add_explicit(&thread->team->task, 1, memory_order_relaxed); }

/* To wake a sleeping thread takes tens of microseconds on a quiet machine, milliseconds on a virtual one or beside others.
   So a member stays awake for a while: after a step, since decode steps follow each other at once, and when it is told
   that a step is being prepared. It lets others have the core all the while. */
#define AWAKE_NS 3000000

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether the step after `done` begins soon. */
static int begins_soon(pk_team *team, long done) {
    const int64_t end = nanoseconds() + AWAKE_NS;
    do {
        if (atomic_load_explicit(&team->step, memory_order_acquire) != done) return 1;
        sched_yield();
    } while (nanoseconds() < end);
    return 0;
}

/* Until the step after `done` begins. Returns 0 to end. */
static int await_step(pk_team *team, long done) {
    int stopping;
    while (!begins_soon(team, done)) {
        pthread_mutex_lock(&team->lock);
        for (long roused = team->roused; team->step == done && team->roused == roused && !team->stopping;)
            pthread_cond_wait(&team->wake, &team->lock);
        stopping = team->stopping;
        pthread_mutex_unlock(&team->lock);
        if (stopping) return 0;
    }
    return 1;
}

static void *member(void *argument) {
    pk_thread *thread = argument;
    pk_team *team = thread->team;
    for (long done = 0; await_step(team, done); done++) {
        team->work(thread, team->argument);
        team_wait(thread);
    }
    return NULL;
}

/* Keep the others off the processor that the first thread runs on, which is busy with it: a thread that the system wakes
   there waits for a slice of time, some milliseconds, before it is moved. They may run anywhere else. */
static void keep_apart(pk_team *team) {
    const int here = sched_getcpu();
    if (here == team->caller || here < 0) return;
    team->caller = here;
    cpu_set_t others = team->allowed;
    CPU_CLR(here, &others);
    if (CPU_COUNT(&others) < team->count - 1) return;
    for (int i = 1; i < team->count; i++) pthread_setaffinity_np(team->handle[i], sizeof others, &others);
}

/* The first thread calls it. */
void team_rouse(pk_team *team) {
    keep_apart(team);
    pthread_mutex_lock(&team->lock);
    team->roused++;
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

void team_run(pk_team *team, void (*work)(pk_thread *, void *), void *argument) {
    keep_apart(team);
    pthread_mutex_lock(&team->lock);
    team->work = work;
    team->argument = argument;
    atomic_fetch_add_explicit(&team->step, 1, memory_order_release);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
    work(&team->thread[0], argument);
    team_wait(&team->thread[0]);
}

pk_team *team_start(int threads, size_t scratch_bytes) {
    pk_team *team = aligned_alloc(64, (sizeof *team + 63) / 64 * 64);
    if (!team) return NULL;
    memset(team, 0, sizeof *team);
    team->caller = -1;
    if (sched_getaffinity(0, sizeof team->allowed, &team->allowed) != 0) CPU_ZERO(&team->allowed);
    team->spins = CPU_COUNT(&team->allowed) < threads ? 0 : SPINS;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->wake, NULL);
    team->thread = calloc((size_t)threads, sizeof *team->thread);
    team->handle = calloc((size_t)threads, sizeof *team->handle);
    if (!team->thread || !team->handle) goto failed;
    for (int i = 0; i < threads; i++) { /* count is set last: a barrier waits only for threads that run */
        char *scratch = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
        team->thread[i] = (pk_thread){team, i, threads, scratch};
        if (!scratch || (i > 0 && pthread_create(&team->handle[i], NULL, member, &team->thread[i]) != 0)) {
            free(scratch);
            team->thread[i].scratch = NULL;
            goto failed;
        }
        team->count = i + 1;
    }
    return team;
failed:
    team_stop(team);
    return NULL;
}

void team_stop(pk_team *team) {
    pthread_mutex_lock(&team->lock);
    team->stopping = 1;
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->count; i++) {
        if (i > 0) pthread_join(team->handle[i], NULL);
        free(team->thread[i].scratch);
    }
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->wake);
    free(team->thread);
    free(team->handle);
    free(team);
}
