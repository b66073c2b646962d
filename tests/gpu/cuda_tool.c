/* A cuda-checkpoint that is none: NVIDIA's command line, and the state of each process in its own memory.
 *
 * The state is in the stand-in of the CUDA library (cuda_library.c), which a process must map. As the real one
 * it needs the process to run: it waits for one that is stopped. Two files lie beside the program:
 *
 *   calls      gets a line for each call: CALL PID, and the device map
 *   control    lines that a test has written, looked at in each call:
 *                cost MS              what each call takes
 *                fail CALL N          the N-th call of this kind fails and changes nothing; 0: each
 *                hang CALL N          it does not come back
 *                half CALL N          it changes the state and does not come back
 *                busy CALL N          it waits for its --timeout
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#define MAGIC "HIBERNODE-CUDA-"
static const char *STATES[] = {"running", "locked", "checkpointed", "failed"};
static const struct { const char *name; int from, to; } ACTIONS[] = {
    {"lock", 1, 2}, {"checkpoint", 2, 3}, {"restore", 3, 2}, {"unlock", 2, 1}};
static const char *HELP =
    "CUDA checkpoint and restore utility.\n"
    "Version 580.65.06. Copyright (C) 2025 NVIDIA Corporation. All rights reserved.\n\n"
    "    --get-state --pid|-p <pid>\n"
    "    --action lock|checkpoint|restore|unlock --pid|-p <pid> [--timeout|-t <ms>] [--device-map|-d <map>]\n"
    "    --get-restore-tid --pid|-p <pid>\n"
    "    --help|-h\n";

static void wait_ms(long ms)
{
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static int refuse(const char *call, int pid, const char *why)
{
    printf("Could not %s process ID %d: \"%s\"\n", call, pid, why);
    return 1;
}

/* Find the place of the state in the memory of a process; 0: there is none. */
static off_t find(int pid, int memory)
{
    char path[64], line[PATH_MAX + 128];
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "r");
    off_t found = 0;
    while (maps && !found && fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char rights[8], magic[sizeof MAGIC];
        if (!strstr(line, "libcuda.so") || sscanf(line, "%lx-%lx %7s", &start, &end, rights) != 3 || rights[1] != 'w')
            continue;
        for (unsigned long at = start; at < end && !found; at += 64)
            if (pread(memory, magic, sizeof magic, at) == sizeof magic && !memcmp(magic, MAGIC, sizeof magic))
                found = at + 16;
    }
    if (maps)
        fclose(maps);
    return found;
}

static int stopped(int pid)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    char *end = strrchr(text, ')');
    return end && (end[2] == 'T' || end[2] == 't');
}

/* Note the call; how many of its kind there have been. */
static int note(const char *call, int pid, const char *map)
{
    char line[256];
    int count = 0;
    FILE *calls = fopen("calls", "a+");
    if (!calls)
        return 0;
    flock(fileno(calls), LOCK_EX);
    fprintf(calls, "%s %d%s%s\n", call, pid, *map ? " " : "", map);
    fflush(calls);
    rewind(calls);
    while (fgets(line, sizeof line, calls))
        count += !strncmp(line, call, strlen(call)) && line[strlen(call)] == ' ';
    fclose(calls);
    return count;
}

/* What the test wants of this call: a word, or nothing. */
static void wanted(const char *call, int number, char *what, long *cost)
{
    char line[256], word[16], which[32];
    int of;
    FILE *control = fopen("control", "r");
    while (control && fgets(line, sizeof line, control)) {
        sscanf(line, "cost %ld", cost);
        if (sscanf(line, "%15s %31s %d", word, which, &of) == 3 && !strcmp(which, call) && (!of || of == number))
            strcpy(what, word);
    }
    if (control)
        fclose(control);
}

int main(int argc, char **argv)
{
    static const struct option OPTIONS[] = {
        {"help", 0, 0, 'h'}, {"get-state", 0, 0, 's'}, {"get-restore-tid", 0, 0, 'r'}, {"action", 1, 0, 'a'},
        {"pid", 1, 0, 'p'}, {"timeout", 1, 0, 't'}, {"device-map", 1, 0, 'd'}, {0, 0, 0, 0}};
    const char *call = NULL, *map = "";
    char own[PATH_MAX], what[16] = "";
    int pid = 0, option;
    long timeout = 0, cost = 0;
    while ((option = getopt_long(argc, argv, "hp:t:d:", OPTIONS, NULL)) != -1)
        switch (option) {
        case 'h': return fputs(HELP, stdout) < 0;
        case 's': call = "get-state"; break;
        case 'r': call = "get-restore-tid"; break;
        case 'a': call = optarg; break;
        case 'p': pid = atoi(optarg); break;
        case 't': timeout = atol(optarg); break;
        case 'd': map = optarg; break;
        default: return 1;
        }
    if (!call || pid <= 0)
        return fputs("Invalid arguments\n", stdout), 1;
    if (timeout && strcmp(call, "lock"))
        return fputs("--timeout is only supported for lock\n", stdout), 1;
    ssize_t length = readlink("/proc/self/exe", own, sizeof own - 1);
    if (length < 0 || (own[length] = 0, chdir(dirname(own))))
        return 1;
    wanted(call, note(call, pid, map), what, &cost);
    wait_ms(cost);
    if (!strcmp(what, "fail"))
        return refuse(call, pid, "OS call failed or operation not supported on this OS");
    while (!strcmp(what, "hang"))
        pause();
    if (!strcmp(what, "busy"))
        return wait_ms(timeout), refuse(call, pid, "device not ready");

    char path[64];
    int state = 0;
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    int memory = open(path, O_RDWR);
    off_t place = memory < 0 ? 0 : find(pid, memory);
    if (!place || pread(memory, &state, sizeof state, place) != sizeof state || state < 1 || state > 4)
        return refuse(call, pid, "initialization error");
    if (!strcmp(call, "get-state"))
        return puts(STATES[state - 1]) < 0;
    if (!strcmp(call, "get-restore-tid"))
        return printf("%d\n", pid) < 0;
    for (size_t index = 0; index < sizeof ACTIONS / sizeof *ACTIONS; index++)
        if (!strcmp(call, ACTIONS[index].name)) {
            if (state != ACTIONS[index].from)
                return refuse(call, pid, "the operation cannot be performed in the present state");
            for (long waited = 0; stopped(pid); waited += 5) {
                if (timeout && waited > timeout)
                    return refuse(call, pid, "device not ready");
                wait_ms(5);
            }
            if (pwrite(memory, &ACTIONS[index].to, sizeof(int), place) != sizeof(int))
                return refuse(call, pid, strerror(errno));
            while (!strcmp(what, "half"))
                pause();
            return 0;
        }
    return fputs("Invalid action\n", stdout), 1;
}
