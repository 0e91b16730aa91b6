/* A few threads that work in step: started once, woken for each step, meeting at barriers within it. */

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "pk.h"

struct pk_team {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint round; /* of the barrier; begins again at 0 after some hours */
    _Alignas(64) atomic_int task;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    long step; /* counts the steps begun; under `lock` */
    int stopping;
    void (*work)(pk_thread *, void *);
    void *argument;
    int count;
    pk_thread *thread;
    pthread_t *handle;
};

#define SPINS 4096 /* a few tens of microseconds; then whoever else wants the core may have it */

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
        if (spins < SPINS)
            _mm_pause();
        else
            sched_yield();
    }
}

int team_next_task(pk_thread *thread) { return atomic_fetch_add_explicit(&thread->team->task, 1, memory_order_relaxed); }

static void *member(void *argument) {
    pk_thread *thread = argument;
    pk_team *team = thread->team;
    for (long done = 0;; done++) {
        pthread_mutex_lock(&team->lock);
        while (team->step == done && !team->stopping) pthread_cond_wait(&team->wake, &team->lock);
        int stopping = team->stopping;
        pthread_mutex_unlock(&team->lock);
        if (stopping) return NULL;
        team->work(thread, team->argument);
        team_wait(thread);
    }
}

void team_run(pk_team *team, void (*work)(pk_thread *, void *), void *argument) {
    pthread_mutex_lock(&team->lock);
    team->work = work;
    team->argument = argument;
    team->step++;
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
    work(&team->thread[0], argument);
    team_wait(&team->thread[0]);
}

pk_team *team_start(int threads, size_t scratch_bytes) {
    pk_team *team = aligned_alloc(64, (sizeof *team + 63) / 64 * 64);
    if (!team) return NULL;
    memset(team, 0, sizeof *team);
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
