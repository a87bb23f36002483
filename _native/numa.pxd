# Where the memory of a thread comes from on machines with several NUMA nodes: the kernel's policies, by system calls,
# because the library of <numaif.h> is not needed for three of them.

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
    # The calling thread gets new memory from this node only. Not 0: see errno.
    long bind_to_node "inferd_bind_to_node"(int node) noexcept nogil
    # It gets new memory from this node while there is some (-1: nothing changes), until `restore_policy` with what is
    # returned. Where the kernel does not tell the policy of the thread, it stays.
    MemoryPolicy prefer_node "inferd_prefer_node"(int node) noexcept nogil
    void restore_policy "inferd_restore_policy"(const MemoryPolicy *before) noexcept nogil
