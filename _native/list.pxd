# Doubly linked lists, from which an item is removed without a search. They neither allocate nor lock.
#
# A list is any structure with `first` and `last`. An item is any structure with `previous` and `next`: pointers to the
# items' type, NULL at the ends and in an item that is in no list. These are macros, as in <sys/queue.h>, because
# functions cannot keep the types. Each takes the address of a list and that of an item.

from inferd._native.assertion cimport assert_that

cdef extern from *:
    """
    #define INFERD_LIST_APPEND(list, item) do {                                                                     \\
        __typeof__(list) list_ = (list);                                                                            \\
        __typeof__(item) item_ = (item);                                                                            \\
        item_->previous = list_->last;                                                                              \\
        item_->next = NULL;                                                                                         \\
        if (list_->last == NULL) list_->first = item_; else list_->last->next = item_;                              \\
        list_->last = item_;                                                                                        \\
    } while (0)

    #define INFERD_LIST_PREPEND(list, item) do {                                                                    \\
        __typeof__(list) list_ = (list);                                                                            \\
        __typeof__(item) item_ = (item);                                                                            \\
        item_->previous = NULL;                                                                                     \\
        item_->next = list_->first;                                                                                 \\
        if (list_->first == NULL) list_->last = item_; else list_->first->previous = item_;                         \\
        list_->first = item_;                                                                                       \\
    } while (0)

    #define INFERD_LIST_REMOVE(list, item) do {                                                                     \\
        __typeof__(list) list_ = (list);                                                                            \\
        __typeof__(item) item_ = (item);                                                                            \\
        inferd_assert((item_->previous == NULL ? list_->first : item_->previous->next) == item_);                   \\
        inferd_assert((item_->next == NULL ? list_->last : item_->next->previous) == item_);                        \\
        if (item_->previous == NULL) list_->first = item_->next; else item_->previous->next = item_->next;          \\
        if (item_->next == NULL) list_->last = item_->previous; else item_->next->previous = item_->previous;       \\
        item_->previous = item_->next = NULL;                                                                       \\
    } while (0)
    """
    void list_append "INFERD_LIST_APPEND"(void *list, void *item) noexcept nogil
    void list_prepend "INFERD_LIST_PREPEND"(void *list, void *item) noexcept nogil
    void list_remove "INFERD_LIST_REMOVE"(void *list, void *item) noexcept nogil
