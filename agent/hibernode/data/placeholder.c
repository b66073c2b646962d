/* The placeholder: what a restore pod runs as its command until the node's agent has restored a worker there.
 *
 *     placeholder [--wait SECONDS] [--] [COMMAND [ARGUMENT...]]
 *
 * It waits for the agent's word and then stands in for the worker: it reaps orphans, hands signals on, and
 * ends as the worker ends. It opens no file and needs none, so that it runs in any image:
 *
 *     gcc -std=gnu11 -static -s -Os -Wall -Wextra -Werror -o placeholder placeholder.c
 *
 * The agent knows it by its name and by the blocked signals in /proc/PID/status. It speaks by a queued signal
 * MESSAGE, sent from an outer pid namespace (the kernel then makes the sender's pid 0), whose value says:
 *
 *     N > 0   process N, of this namespace, is the restored worker
 *     0       nothing was restored: run COMMAND (without one: go on waiting)
 *     N < 0   reserved, ignored
 *
 * What has another sender comes from inside and is ignored. A process inside that may signal this one can
 * also forge the 0; it could as well end the container, so that it gains nothing.
 *
 * Before it has a worker, nothing is reaped (a worker that ends early keeps its exit status) and SIGTERM,
 * SIGINT and SIGQUIT end it. With a worker, all that can be caught but SIGCHLD is handed on.
 *
 * Exit codes: the worker's own; 128 + the signal that ended the worker, SIGTERM, SIGINT or SIGQUIT;
 * 124 nothing came within SECONDS and there is no COMMAND; 125 there is no such worker, or how it ended
 * cannot be known; 126 COMMAND cannot be run; 127 there is no COMMAND of that name; 2 usage.
 *
 * As a rule it is pid 1, to whom the kernel gives the worker when CRIU ends. Under another init (tini, a pod
 * with shareProcessNamespace) the worker is that one's child, and being a subreaper would not change it: CRIU
 * was started from outside. The worker is then watched through a pidfd, and Linux 6.15 or later tells how it
 * ended.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
	MESSAGE = 40,
	/* How long an ended worker stays a zombie, so that the agent, woken by its pidfd, can read how it ended
	 * from /proc/N/stat: with this process goes the whole pid namespace. */
	SHOWN_MS = 50,
	/* How long the end of a worker that is somebody else's child may stay unknown until that one reaps it. */
	UNKNOWN_MS = 1000,
	STEP_MS = 10,
	EXIT_USAGE = 2,
	EXIT_TIMEOUT = 124,
	EXIT_LOST = 125,
	EXIT_CANNOT_RUN = 126,
	EXIT_NOT_FOUND = 127,
	MAX_WAIT_SECONDS = INT_MAX / 1000,
};

/* linux/pidfd.h of 6.15: struct pidfd_info in its first form (64 bytes), what to ask for, and the call. */
struct pidfd_info {
	uint64_t mask, cgroupid;
	uint32_t pid, tgid, ppid, ids[8];
	int32_t exit_code;
};
#define INFO_EXIT (UINT64_C(1) << 3)
#define GET_INFO _IOWR(0xFF, 11, struct pidfd_info)

static pid_t worker;
static int worker_fd = -1; /* its pidfd */
static int watched = -1;   /* the same while the worker is not our child, whose end SIGCHLD tells */
static char **command;
/* Two signalfds: the kernel gives the lowest number first, but what follows a message is for the worker. */
static int messages, others;

static int exit_code(int status)
{
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void nap(int ms)
{
	struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
	nanosleep(&time, NULL);
}

static int64_t now_ms(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * INT64_C(1000) + time.tv_nsec / 1000000;
}

static _Noreturn void lost(const char *why)
{
	dprintf(2, "hibernode-placeholder: process %d %s\n", (int)worker, why);
	_exit(EXIT_LOST);
}

static _Noreturn void cold_start(void)
{
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	execvp(command[0], command);
	int number = errno;
	dprintf(2, "hibernode-placeholder: %s: %s\n", command[0], strerror(number));
	_exit(number == ENOENT || number == ENOTDIR ? EXIT_NOT_FOUND : EXIT_CANNOT_RUN);
}

/* Reap what is dead, but never the worker: it has to stay visible, and its status is for look(). */
static void reap(void)
{
	for (;;) {
		siginfo_t end = {0};
		if (waitid(P_ALL, 0, &end, WEXITED | WNOHANG | WNOWAIT) != 0 || end.si_pid == 0 ||
		    end.si_pid == worker)
			return;
		waitpid(end.si_pid, NULL, 0);
	}
}

/* End as the worker ended, if it has. */
static void look(void)
{
	for (int waited = 0;; waited += STEP_MS) {
		siginfo_t end = {0};
		struct pidfd_info info = {.mask = INFO_EXIT};
		struct pollfd ended = {worker_fd, POLLIN, 0};
		int ours = waitid(P_PID, (id_t)worker, &end, WEXITED | WNOHANG | WNOWAIT) == 0;
		watched = ours ? -1 : worker_fd;
		if (ours && end.si_pid == worker) {
			nap(SHOWN_MS);
			_exit(end.si_code == CLD_EXITED ? end.si_status : 128 + end.si_status);
		}
		if (ours)
			return;
		if (worker_fd < 0)
			lost("is no child of this one, and there is no pidfd to watch it by");
		if (poll(&ended, 1, 0) == 0)
			return;
		if (ioctl(worker_fd, GET_INFO, &info) == 0 && info.mask & INFO_EXIT)
			_exit(exit_code(info.exit_code));
		if (waited >= UNKNOWN_MS)
			lost("has ended; it was no child of this one and the kernel does not tell how");
		nap(STEP_MS);
	}
}

static void hear(int value)
{
	if (value > 0) {
		worker = value;
		worker_fd = (int)syscall(SYS_pidfd_open, worker, 0);
		if (worker == getpid() || (worker_fd < 0 && errno == ESRCH))
			lost("is not there to be adopted");
	} else if (value == 0) {
		reap();
		if (command[0])
			cold_start();
	}
}

static int next(int fd, struct signalfd_siginfo *got)
{
	return read(fd, got, sizeof *got) == (ssize_t)sizeof *got;
}

static void take_messages(void)
{
	struct signalfd_siginfo got;
	while (next(messages, &got))
		if (!worker && got.ssi_code == SI_QUEUE && got.ssi_pid == 0)
			hear(got.ssi_int);
}

static void take_signals(void)
{
	struct signalfd_siginfo got;
	take_messages();
	while (next(others, &got)) {
		int number = (int)got.ssi_signo;
		take_messages(); /* what came before it */
		if (number == SIGCHLD)
			continue;
		if (worker)
			kill(worker, number);
		else if (number == SIGTERM || number == SIGINT || number == SIGQUIT)
			_exit(128 + number);
	}
}

static int signal_fd(const sigset_t *set)
{
	int fd = signalfd(-1, set, SFD_NONBLOCK | SFD_CLOEXEC);
	/* Of 0, 1 and 2, what was closed stays closed. */
	int high = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (high < 0) {
		dprintf(2, "hibernode-placeholder: signalfd: %s\n", strerror(errno));
		_exit(EXIT_LOST);
	}
	close(fd);
	return high;
}

static void open_signals(void)
{
	sigset_t all;
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	/*
	 * A SIGCHLD that our parent ignored would make the kernel throw exit statuses away. By the bare call,
	 * for libc keeps its hands on 32 and 33. All zeroes is the default on every architecture.
	 */
	const unsigned long standard[4] = {0};
	for (int number = 1; number < NSIG; number++)
		syscall(SYS_rt_sigaction, number, standard, NULL, sizeof standard[0]);
	sigset_t message;
	sigemptyset(&message);
	sigaddset(&message, MESSAGE);
	sigdelset(&all, MESSAGE);
	messages = signal_fd(&message);
	others = signal_fd(&all);
}

/* Read the options; returns the seconds to wait, or -1. */
static long parse(char **argv)
{
	long seconds = -1;
	char **word = *argv ? argv + 1 : argv;
	for (; *word && **word == '-'; word++) {
		char *rest = "";
		if (strcmp(*word, "--") == 0) {
			word++;
			break;
		}
		if (strcmp(*word, "--wait") == 0 && word[1] && *word[1] >= '0' && *word[1] <= '9')
			seconds = strtol(*++word, &rest, 10);
		else
			rest = *word;
		if (*rest || seconds > MAX_WAIT_SECONDS) {
			dprintf(2, "hibernode-placeholder: %s: not understood\n"
				   "  placeholder [--wait SECONDS] [--] [COMMAND [ARGUMENT...]]\n", *word);
			_exit(EXIT_USAGE);
		}
	}
	command = word;
	return seconds;
}

int main(int argc, char **argv)
{
	(void)argc;
	long seconds = parse(argv);
	int64_t deadline = now_ms() + seconds * INT64_C(1000);
	open_signals();
	/* Last, so that whoever sees the name can speak. */
	prctl(PR_SET_NAME, "hibernode-ph");
	for (;;) {
		struct pollfd any[] = {{messages, POLLIN, 0}, {others, POLLIN, 0}, {watched, POLLIN, 0}};
		int64_t left = -1;
		if (seconds >= 0 && !worker && (left = deadline - now_ms()) < 0)
			left = 0;
		poll(any, 3, (int)left);
		take_signals(); /* what has come in time counts, also when we are late */
		if (worker) {
			look();
			reap();
		} else if (left == 0) {
			if (command[0])
				cold_start();
			_exit(EXIT_TIMEOUT);
		}
	}
}
