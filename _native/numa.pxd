# The kernel's policies for the memory of a thread on machines with several NUMA nodes. They are system calls here,
# because three calls do not justify a dependency on the library of <numaif.h>.

cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>
    enum { INFERD_NODES = 1024, INFERD_NODE_BITS = 8 * sizeof(unsigned long) };
    typedef struct {
        int known;               /* the kernel told it */
        int mode;                /* with its flags */
        unsigned long nodes[INFERD_NODES / INFERD_NODE_BITS];
    } inferd_memory_policy;

    static inline long inferd_set_policy(const inferd_memory_policy *policy) {
        return syscall(SYS_set_mempolicy, policy->mode, policy->nodes, (unsigned long)INFERD_NODES + 1);
    }
    static inline inferd_memory_policy inferd_policy_of(int mode, int node) {
        inferd_memory_policy policy = {1, mode, {0}};
        policy.nodes[node / INFERD_NODE_BITS] = 1UL << (node % INFERD_NODE_BITS);
        return policy;
    }
    static inline long inferd_bind_to_node(int node) {
        inferd_memory_policy policy = inferd_policy_of(2 /* MPOL_BIND */, node);
        return inferd_set_policy(&policy);
    }
    static inline inferd_memory_policy inferd_prefer_node(int node) {
        inferd_memory_policy before = {0}, wanted;
        if (node < 0 || node >= INFERD_NODES) return before;
        before.known = !syscall(SYS_get_mempolicy, &before.mode, before.nodes, (unsigned long)INFERD_NODES, 0UL, 0UL);
        wanted = inferd_policy_of(1 /* MPOL_PREFERRED */, node);
        if (before.known) inferd_set_policy(&wanted);
        return before;
    }
    static inline void inferd_restore_policy(const inferd_memory_policy *before) {
        if (before->known) inferd_set_policy(before);
    }
    """
    enum:
        MAX_NODES "INFERD_NODES"
    ctypedef struct MemoryPolicy "inferd_memory_policy":
        pass
    # From now on the calling thread gets new memory from this node only. Returns 0, or sets errno.
    long bind_to_node "inferd_bind_to_node"(int node) noexcept nogil
    # The calling thread prefers new memory from this node (-1: nothing changes) until it calls `restore_policy` with
    # the returned policy. If the kernel does not report the thread's policy, nothing changes.
    MemoryPolicy prefer_node "inferd_prefer_node"(int node) noexcept nogil
    void restore_policy "inferd_restore_policy"(const MemoryPolicy *before) noexcept nogil
